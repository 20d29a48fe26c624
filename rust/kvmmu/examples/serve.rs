//! A toy engine from Rust alone: prompts with a shared prefix, decode steps, a fork, and
//! compaction between steps, over plain memory.
//!
//! `cargo run -p kvmmu --example serve`

use kvmmu::{Config, Keys, Mmu, Rows};

const BLOCK: usize = 16;

/// One word of "KV" a token, in blocks.
struct Memory(Vec<u64>);

impl Memory {
    fn copy(&mut self, pairs: &[[u32; 2]]) {
        for &[source, destination] in pairs {
            let from = source as usize * BLOCK;
            self.0
                .copy_within(from..from + BLOCK, destination as usize * BLOCK);
        }
    }
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mmu = Mmu::new(Config::new(1024, BLOCK as u32))?;
    let mut memory = Memory(vec![0; 1025 * BLOCK]);
    let mut rows = Rows::new(&mmu, 8, 256, 4096)?;
    let mut tables = rows.buffers();

    // Six prompts of 500 tokens that share their first 256.
    let mut ids = Vec::new();
    for prompt in 0..6 {
        let tokens: Vec<i32> = (0..500)
            .map(|i| if i < 256 { i } else { i + 1000 * prompt })
            .collect();
        let id = mmu.open(&tokens, Keys::default())?;
        let cached = mmu.info(id)?.num_cached_tokens as i32;
        println!("prompt {prompt}: {cached} of 500 tokens found cached");
        let step = mmu.begin_step();
        let query = [500 - cached];
        mmu.prepare(
            step,
            &[id],
            Some(&query),
            None,
            &mut rows,
            &mut tables.borrow(),
        )?;
        for &slot in &tables.slot_mapping[..rows.num_tokens()] {
            memory.0[slot as usize] = 1;
        }
        mmu.written(step)?;
        mmu.end_step(step)?;
        ids.push(id);
    }

    // One of them is forked, every second one ends.
    ids.push(mmu.fork(ids[1])?);
    for id in [ids[0], ids[2], ids[4]] {
        mmu.close(id)?;
    }
    ids.retain(|&id| mmu.info(id).is_ok());

    // Decode, and compact between steps: at most 8 blocks each.
    for token in 0..40 {
        let step = mmu.begin_step();
        let new = vec![token; ids.len()];
        let copies = mmu.prepare(
            step,
            &ids,
            None,
            Some(&new),
            &mut rows,
            &mut tables.borrow(),
        )?;
        memory.copy(&copies);
        for &slot in &tables.slot_mapping[..rows.num_tokens()] {
            memory.0[slot as usize] = 2;
        }
        mmu.written(step)?;
        mmu.end_step(step)?;

        let plan = mmu.plan_below(0.01, 8)?;
        let moves = mmu.begin(&plan)?;
        memory.copy(moves.pairs());
        let moved = mmu.commit(&moves)?;
        if moved > 0 {
            println!(
                "step {step}: moved {moved}, ratio {:.3}",
                mmu.measure().ratio_available()
            );
        }
    }
    mmu.validate(None)?;
    println!("{:?}", mmu.states());
    Ok(())
}
