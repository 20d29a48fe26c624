//! Models of the pool: every interleaving, up to a bound on preemptions, and every reading that the
//! memory model allows, of a few operations by two or three threads on the shipped code.
//!
//! What lives here: programs as small as reach their path, in pools of two windows of four or
//! eight blocks. What never lives here: random programs (`pool.rs`, `shuttle.rs`,
//! `examples/stress.rs`).
//!
//!     RUSTFLAGS="--cfg loom" cargo test -p kvmmu --test loom
//!
//! Each model ends with a recount of everything. Each states its bound; `LOOM_MAX_PREEMPTIONS`
//! replaces all of them, and `KVMMU_MODELS=short` lowers them by one.
#![cfg(loom)]

use kvmmu::model::this_is_thread;
use kvmmu::{Pool, PoolConfig};
use loom::sync::Arc;
use loom::thread;

/// Runs a model with at most this many preemptions an execution.
fn model(preemptions: usize, model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    if builder.preemption_bound.is_none() {
        let short = std::env::var("KVMMU_MODELS").is_ok_and(|how| how == "short");
        builder.preemption_bound = Some(preemptions - usize::from(short));
    }
    builder.check(model);
}

/// A thread of a pool: its seat is its number, modulo two.
fn spawn<T: 'static>(
    number: usize,
    pool: &Arc<Pool<2, 2>>,
    work: impl FnOnce(&Pool<2, 2>) -> T + 'static,
) -> thread::JoinHandle<T> {
    let pool = Arc::clone(pool);
    thread::spawn(move || {
        this_is_thread(number);
        work(&pool)
    })
}

fn pool(num_blocks: u32) -> Arc<Pool<2, 2>> {
    Arc::new(Pool::new(&PoolConfig::new(num_blocks)).unwrap())
}

/// Three blocks for two: nobody is told that there are none, whatever the other is moving between
/// its home and the total at that moment.
#[test]
fn enough_for_everybody_is_enough() {
    model(2, || {
        let pool = pool(4);
        let other = spawn(1, &pool, |pool| pool.claim().unwrap());
        let mine = pool.claim().unwrap();
        assert_ne!(mine, other.join().unwrap());
        pool.audit().unwrap();
        assert_eq!(pool.empty(), 2);
    });
}

/// As above, while another thread asks for more than there is.
#[test]
fn a_refused_batch_makes_no_other_claim_fail() {
    model(2, || {
        let pool = pool(4);
        let first = pool.claim().unwrap();
        let other = spawn(1, &pool, |pool| {
            pool.claim_batch(4, &mut Vec::new()).unwrap_err();
        });
        let mine = pool.claim().unwrap();
        assert_ne!(mine, first);
        other.join().unwrap();
        pool.audit().unwrap();
    });
}
