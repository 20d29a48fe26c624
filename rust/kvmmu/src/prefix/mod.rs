//! The prefix index: which full blocks hold which tokens behind which prefix, and in which order
//! cached ones are evicted.
//!
//! What lives here: a tree of prefixes (one node a distinct block content behind a distinct parent,
//! found by its chained hash), the blocks that hold each, and the eviction order. What never lives
//! here: reference counts, states, sequences.
//!
//! - A node is compared, never trusted by hash: parent node, tokens and key must be equal.
//! - Several blocks may hold the same content (two sequences computed it at once); they hang on one
//!   node, and losing one leaves the others matched.
//! - When a node loses its last block, nothing behind it can be found any more, so its whole subtree
//!   leaves the index with it and is reported to the caller.
//!
//! All of it stands behind the shared lock of [`crate::state::Mmu`].

mod events;
mod hash;
mod order;
mod tokens;

use hashbrown::HashTable;

use crate::config::{Config, Eviction};
use crate::error::{Error, Result};
use crate::sync::{filled, no_memory, reserved};

use events::Log;
pub use events::{Event, Events, Kind};
pub use hash::Keys;
use hash::{ROOT_HASH, chain};
use order::{MAX_USES, Order};
pub(crate) use tokens::Tokens;

const NONE: u32 = u32::MAX;
/// Most blocks that a walk hashes ahead of its look-ups.
const AHEAD: usize = 64;

#[derive(Debug)]
struct Node {
    hash: u128,
    key: Option<Box<[u8]>>,
    parent: u32,
    /// First of the blocks with this content; the others follow in `Index::twins`.
    block: u32,
    child: u32,
    /// Siblings: (previous, next).
    siblings: (u32, u32),
    /// How often a prompt found it, when the order had this age.
    uses: u16,
    age: u64,
    /// A prompt found it while several blocks held it: one that waits to be evicted may stand in
    /// a lower class than its uses say.
    used_as_twin: bool,
}

/// The prefix index.
#[derive(Debug)]
pub(crate) struct Index {
    block_size: usize,
    nodes: Vec<Node>,
    free: Vec<u32>,
    by_hash: HashTable<u32>,
    /// Node of a block, `NONE` unless published.
    node_of: Box<[u32]>,
    /// Blocks with the same content: (previous, next).
    twins: Box<[(u32, u32)]>,
    order: Order,
    scratch: Vec<u8>,
    tokens: Vec<i32>,
    /// What becomes of blocks, for who asked to be told.
    log: Option<Box<Log>>,
    /// All ones; tests clear bits to force collisions.
    hash_mask: u128,
}

impl Index {
    /// An index over `num_blocks` blocks; 0 when prefixes are not cached.
    pub(crate) fn new(num_blocks: u32, block_size: u32, eviction: Eviction) -> Result<Self> {
        let n = num_blocks as usize;
        let mut by_hash = HashTable::new();
        // At most one node a block: nothing grows, and so nothing stalls, while serving.
        by_hash
            .try_reserve(n, |_: &u32| 0)
            .map_err(|_| no_memory(n, size_of::<u32>() + 1))?;
        Ok(Self {
            block_size: block_size as usize,
            nodes: reserved(n)?,
            free: Vec::new(),
            by_hash,
            node_of: filled(NONE, n)?,
            twins: filled((NONE, NONE), n)?,
            order: Order::new(n, eviction)?,
            scratch: Vec::new(),
            tokens: Vec::new(),
            log: None,
            hash_mask: !0,
        })
    }

    /// Notes what becomes of blocks from now on, if the settings say so.
    pub(crate) fn with_log(mut self, config: &Config) -> Result<Self> {
        if config.events > 0 {
            let log = Log::new(config.events as usize, self.block_size)?;
            self.log = Some(Box::new(log));
        }
        Ok(self)
    }

    pub(crate) fn is_on(&self) -> bool {
        !self.node_of.is_empty()
    }

    fn children_of(&self, parent: u32) -> u32 {
        if parent == NONE {
            NONE
        } else {
            self.nodes[parent as usize].child
        }
    }

    fn find(
        &self,
        store: &Tokens,
        hash: u128,
        parent: u32,
        tokens: &[i32],
        key: Option<&[u8]>,
    ) -> Option<u32> {
        let found = self.by_hash.find(hash as u64, |&id| {
            let node = &self.nodes[id as usize];
            node.hash == hash
                && node.parent == parent
                && node.key.as_deref() == key
                && store.equal(node.block, tokens)
        });
        found.copied()
    }

    /// The blocks that hold the longest cached prefix of `tokens`, at most `limit` of them.
    pub(crate) fn walk(
        &mut self,
        store: &Tokens,
        tokens: &[i32],
        keys: &Keys,
        limit: usize,
    ) -> Vec<u32> {
        let mut found = Vec::new();
        if !self.is_on() {
            return found;
        }
        let (mut parent, mut hash) = (NONE, ROOT_HASH);
        let mut scratch = std::mem::take(&mut self.scratch);
        let mut blocks = (0..).zip(tokens.chunks_exact(self.block_size)).take(limit);
        // Hashes first, some blocks ahead: the look-ups then wait for memory side by side. Few ahead
        // at the start, for most prompts that miss miss early.
        let mut ahead = Vec::with_capacity(AHEAD);
        'walk: loop {
            let count = (2 * ahead.len()).clamp(1, AHEAD);
            ahead.clear();
            for (index, tokens) in blocks.by_ref().take(count) {
                let key = keys.of(index);
                hash = chain(hash, tokens, key.as_deref(), &mut scratch) & self.hash_mask;
                ahead.push((hash, tokens, key));
            }
            if ahead.is_empty() {
                break;
            }
            for (hash, tokens, key) in &ahead {
                match self.find(store, *hash, parent, tokens, key.as_deref()) {
                    Some(node) => parent = node,
                    None => break 'walk,
                }
                found.push(self.nodes[parent as usize].block);
            }
        }
        self.scratch = scratch;
        found
    }

    pub(crate) fn is_published(&self, block: u32) -> bool {
        self.is_on() && self.node_of[block as usize] != NONE
    }

    /// Enters a full block behind its parent block (`None`: the first of a prompt). False, and
    /// nothing happens, when the parent is not published itself.
    pub(crate) fn publish(
        &mut self,
        store: &Tokens,
        block: u32,
        parent: Option<u32>,
        key: Option<Box<[u8]>>,
    ) -> bool {
        debug_assert!(!self.is_published(block));
        let (parent, hash) = match parent {
            None => (NONE, ROOT_HASH),
            Some(block) => match self.node_of[block as usize] {
                NONE => return false,
                node => (node, self.nodes[node as usize].hash),
            },
        };
        let mut tokens = std::mem::take(&mut self.tokens);
        tokens.clear();
        store.read(block, &mut tokens);
        let parent_hash = hash;
        let hash = chain(hash, &tokens, key.as_deref(), &mut self.scratch) & self.hash_mask;
        if let Some(log) = &mut self.log {
            log.stored(block, (hash, parent_hash), &tokens, key.clone());
        }
        let node = match self.find(store, hash, parent, &tokens, key.as_deref()) {
            Some(node) => {
                // A second holder of the same content goes behind the first.
                let first = self.nodes[node as usize].block;
                let second = self.twins[first as usize].1;
                self.twins[block as usize] = (first, second);
                self.twins[first as usize].1 = block;
                if second != NONE {
                    self.twins[second as usize].0 = block;
                }
                node
            }
            None => {
                self.twins[block as usize] = (NONE, NONE);
                self.insert(Node {
                    hash,
                    key,
                    parent,
                    block,
                    child: NONE,
                    siblings: (NONE, NONE),
                    uses: 0,
                    age: self.order.age(),
                    used_as_twin: false,
                })
            }
        };
        self.tokens = tokens;
        self.node_of[block as usize] = node;
        true
    }

    fn insert(&mut self, mut node: Node) -> u32 {
        let (hash, parent) = (node.hash, node.parent);
        let sibling = self.children_of(parent);
        node.siblings = (NONE, sibling);
        let id = match self.free.pop() {
            Some(id) => {
                self.nodes[id as usize] = node;
                id
            }
            None => {
                self.nodes.push(node);
                self.nodes.len() as u32 - 1
            }
        };
        if sibling != NONE {
            self.nodes[sibling as usize].siblings.0 = id;
        }
        if parent != NONE {
            self.nodes[parent as usize].child = id;
        }
        let nodes = &self.nodes;
        self.by_hash
            .insert_unique(hash as u64, id, |&id| nodes[id as usize].hash as u64);
        id
    }

    /// The first published block with the content of this one.
    pub(crate) fn first_with(&self, block: u32) -> u32 {
        self.nodes[self.node_of[block as usize] as usize].block
    }

    /// Takes a block out. If it was the last with its content, everything behind it leaves too;
    /// those blocks are appended to `dropped`. A block that is left alone with a content that was
    /// used while there were two is returned: in the order of eviction it stands too low.
    pub(crate) fn withdraw(&mut self, block: u32, dropped: &mut Vec<u32>) -> Option<u32> {
        let node = std::mem::replace(&mut self.node_of[block as usize], NONE);
        debug_assert_ne!(node, NONE);
        self.note_removed(block, node);
        let (before, after) = self.twins[block as usize];
        if before == NONE {
            self.nodes[node as usize].block = after;
        } else {
            self.twins[before as usize].1 = after;
        }
        if after != NONE {
            self.twins[after as usize].0 = before;
        }
        let first = self.nodes[node as usize].block;
        if first == NONE {
            self.unlink(node);
            self.drop_subtree(node, dropped);
            return None;
        }
        let alone = self.twins[first as usize].1 == NONE;
        let too_low = alone && std::mem::take(&mut self.nodes[node as usize].used_as_twin);
        too_low.then_some(first)
    }

    fn note_removed(&mut self, block: u32, node: u32) {
        let hashes = self.hashes(node);
        if let Some(log) = &mut self.log {
            log.removed(block, hashes);
        }
    }

    /// Hash of a node, and of its parent (also when that has just left the index).
    fn hashes(&self, node: u32) -> (u128, u128) {
        let Node { hash, parent, .. } = self.nodes[node as usize];
        let parent_hash = match parent {
            NONE => ROOT_HASH,
            parent => self.nodes[parent as usize].hash,
        };
        (hash, parent_hash)
    }

    /// What became of blocks from the event `since` on, or why that cannot be said.
    pub(crate) fn events(&self, since: u64) -> Result<Events> {
        match &self.log {
            Some(log) => log.since(since),
            None => Err(Error::InvalidConfig(
                "events = 0: a manager notes none unless it was made with more".into(),
            )),
        }
    }

    /// What is published now, parents before children, as if it were stored at this moment.
    pub(crate) fn published(&self, store: &Tokens) -> Events {
        let mut found = Events {
            block_size: self.block_size,
            next: self.log.as_ref().map_or(0, |log| log.next()),
            ..Events::default()
        };
        let mut seen = vec![false; self.nodes.len()];
        let mut path = Vec::new();
        for &first in self.node_of.iter().filter(|&&node| node != NONE) {
            let mut id = first;
            while id != NONE && !std::mem::replace(&mut seen[id as usize], true) {
                path.push(id);
                id = self.nodes[id as usize].parent;
            }
            while let Some(id) = path.pop() {
                let (hash, parent) = self.hashes(id);
                let node = &self.nodes[id as usize];
                let mut block = node.block;
                while block != NONE {
                    found.events.push(Event {
                        kind: Kind::Stored,
                        block,
                        moved_to: None,
                        hash,
                        parent,
                        key: node.key.clone(),
                    });
                    store.read(block, &mut found.tokens);
                    block = self.twins[block as usize].1;
                }
            }
        }
        found
    }

    fn unlink(&mut self, node: u32) {
        let Node {
            parent,
            siblings: (previous, next),
            ..
        } = self.nodes[node as usize];
        if previous != NONE {
            self.nodes[previous as usize].siblings.1 = next;
        } else if parent != NONE {
            self.nodes[parent as usize].child = next;
        }
        if next != NONE {
            self.nodes[next as usize].siblings.0 = previous;
        }
    }

    fn drop_subtree(&mut self, root: u32, dropped: &mut Vec<u32>) {
        let mut rest = Vec::new();
        let mut next = Some(root);
        while let Some(id) = next {
            let node = &mut self.nodes[id as usize];
            let (hash, mut block, mut child) = (node.hash, node.block, node.child);
            node.key = None;
            if let Ok(entry) = self.by_hash.find_entry(hash as u64, |&other| other == id) {
                entry.remove();
            }
            while block != NONE {
                self.node_of[block as usize] = NONE;
                self.note_removed(block, id);
                dropped.push(block);
                block = self.twins[block as usize].1;
            }
            while child != NONE {
                rest.push(child);
                child = self.nodes[child as usize].siblings.1;
            }
            self.free.push(id);
            next = rest.pop();
        }
    }

    /// A published block has moved.
    pub(crate) fn repoint(&mut self, old: u32, new: u32) {
        let node = std::mem::replace(&mut self.node_of[old as usize], NONE);
        self.node_of[new as usize] = node;
        let hashes = self.hashes(node);
        if let Some(log) = &mut self.log {
            log.moved(old, new, hashes);
        }
        let (before, after) = self.twins[old as usize];
        self.twins[new as usize] = (before, after);
        if before == NONE {
            self.nodes[node as usize].block = new;
        } else {
            self.twins[before as usize].1 = new;
        }
        if after != NONE {
            self.twins[after as usize].0 = new;
        }
    }

    /// A block behind `block` that could no longer be found without it and that `may` be evicted.
    /// (Order alone puts leaves first, unless somebody held a leaf alone, by a pin, after its
    /// sequences had gone, or the victims were chosen by where they lie.)
    pub(crate) fn behind(&self, block: u32, may: impl Fn(u32) -> bool) -> Option<u32> {
        let link = |id: u32| (id != NONE).then_some(id);
        let children = |id: u32| {
            let first = link(self.nodes[id as usize].child);
            std::iter::successors(first, move |&id| link(self.nodes[id as usize].siblings.1))
        };
        let id = self.node_of[block as usize];
        if self.nodes[id as usize].block != block || self.twins[block as usize].1 != NONE {
            return None; // another block holds the same content
        }
        let mut rest: Vec<u32> = children(id).collect();
        while let Some(id) = rest.pop() {
            let first = link(self.nodes[id as usize].block);
            let mut holders = std::iter::successors(first, |&b| link(self.twins[b as usize].1));
            if let Some(behind) = holders.find(|&holder| may(holder)) {
                return Some(behind);
            }
            rest.extend(children(id));
        }
        None
    }

    /// A prompt has found these blocks.
    pub(crate) fn used(&mut self, blocks: &[u32]) {
        if !self.order.counts_uses() {
            return;
        }
        for &block in blocks {
            let id = self.node_of[block as usize];
            let uses = self.uses(id).saturating_add(1).min(MAX_USES);
            let node = &mut self.nodes[id as usize];
            (node.uses, node.age) = (uses, self.order.age());
            node.used_as_twin |= self.twins[node.block as usize].1 != NONE;
        }
    }

    /// Uses of a node, halved as often as the order's.
    fn uses(&self, id: u32) -> u16 {
        let node = &self.nodes[id as usize];
        let halved = self.order.age() - node.age;
        node.uses.checked_shr(halved.min(99) as u32).unwrap_or(0)
    }

    /// A cached block enters the order of eviction.
    pub(crate) fn enter_order(&mut self, block: u32) {
        let uses = self.uses(self.node_of[block as usize]);
        self.order.push(block, uses);
    }

    /// The order of eviction.
    pub(crate) fn order(&mut self) -> &mut Order {
        &mut self.order
    }

    /// Blocks that may be evicted, in the order of eviction.
    pub(crate) fn oldest(&self) -> impl Iterator<Item = u32> + '_ {
        self.order.iter()
    }

    /// Checks the order of eviction; each block that stands in it goes to `each`.
    pub(crate) fn check_order(
        &self,
        mut each: impl FnMut(u32) -> std::result::Result<(), String>,
    ) -> std::result::Result<(), String> {
        self.order.check(|block, class| {
            let id = self.node_of[block as usize];
            let node = self.nodes.get(id as usize);
            let node = node.ok_or_else(|| format!("block {block} is evictable, not published"))?;
            // Uses of equal contents count for all of them, also for one that waits here.
            let alone = node.block == block && self.twins[block as usize].1 == NONE;
            let now = self.order.class_of(self.uses(id));
            if class > now || (alone && class != now) {
                return Err(format!(
                    "block {block} stands in class {class}, its uses say {now}"
                ));
            }
            each(block)
        })
    }

    /// Checks that a published block can be found by its own content, and that every link agrees.
    /// `keys` is not known for cached blocks, so the node's own key is used.
    pub(crate) fn check(&self, store: &Tokens, block: u32) -> std::result::Result<(), String> {
        let id = self.node_of[block as usize];
        let node = self
            .nodes
            .get(id as usize)
            .ok_or("published without a node")?;
        let (before, after) = self.twins[block as usize];
        let linked = match before {
            NONE => node.block == block,
            before => self.twins[before as usize].1 == block && self.is_at(before, id),
        };
        if !linked || (after != NONE && self.twins[after as usize].0 != block) {
            return Err(format!(
                "block {block} is not in the chain of its node {id}"
            ));
        }
        self.check_tree(id)?;
        let parent_hash = if node.parent == NONE {
            ROOT_HASH
        } else {
            let parent = &self.nodes[node.parent as usize];
            if parent.block == NONE {
                return Err(format!(
                    "block {block} is published behind a node without a block"
                ));
            }
            parent.hash
        };
        let mut tokens = Vec::new();
        store.read(block, &mut tokens);
        let hash =
            chain(parent_hash, &tokens, node.key.as_deref(), &mut Vec::new()) & self.hash_mask;
        if hash != node.hash {
            return Err(format!(
                "block {block} does not hold the tokens that it is published for"
            ));
        }
        match self.find(store, hash, node.parent, &tokens, node.key.as_deref()) {
            Some(found) if found == id => Ok(()),
            Some(found) => Err(format!(
                "block {block} hangs on node {id}, its content is found at {found}"
            )),
            None => Err(format!(
                "block {block} hangs on node {id}, its content is not found"
            )),
        }
    }

    fn is_at(&self, block: u32, node: u32) -> bool {
        self.node_of[block as usize] == node
    }

    /// A node is its parent's first child, or its previous sibling's next.
    fn check_tree(&self, id: u32) -> std::result::Result<(), String> {
        let node = &self.nodes[id as usize];
        let (previous, next) = node.siblings;
        let linked = match (previous, node.parent) {
            (NONE, NONE) => true, // roots have no list that begins anywhere
            (NONE, parent) => self.nodes[parent as usize].child == id,
            (previous, _) => self.nodes[previous as usize].siblings.1 == id,
        };
        if !linked || (next != NONE && self.nodes[next as usize].siblings.0 != id) {
            return Err(format!("prefix node {id} is not linked to its siblings"));
        }
        Ok(())
    }

    /// Nodes alive, and entries by hash: equal in a sound index.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.nodes.len() - self.free.len(), self.by_hash.len())
    }

    /// Forces hashes to collide.
    #[cfg(test)]
    pub(crate) fn mask_hashes(&mut self, mask: u128) {
        self.hash_mask = mask;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fixture {
        store: Tokens,
        index: Index,
    }

    impl Fixture {
        fn new(mask: u128) -> Self {
            let mut index = Index::new(16, 2, Eviction::Lru).unwrap();
            index.mask_hashes(mask);
            Self {
                store: Tokens::new(16, 2, true).unwrap(),
                index,
            }
        }
        fn publish(&mut self, block: u32, parent: Option<u32>, tokens: [i32; 2]) {
            self.store.store(block, 0, &tokens);
            assert!(self.index.publish(&self.store, block, parent, None));
            self.index.check(&self.store, block).unwrap();
        }
        fn walk(&mut self, tokens: &[i32]) -> Vec<u32> {
            self.index.walk(&self.store, tokens, &Keys::default(), 99)
        }
    }

    #[test]
    fn equal_hashes_of_different_contents_never_match() {
        let mut f = Fixture::new(0);
        f.publish(0, None, [1, 2]);
        f.publish(1, Some(0), [3, 4]);
        f.publish(2, None, [7, 8]);
        assert_eq!(f.walk(&[1, 2, 3, 4]), [0, 1]);
        assert_eq!(f.walk(&[7, 8, 3, 4]), [2]);
        assert_eq!(f.walk(&[3, 4]), [0; 0]);
        assert_eq!(f.walk(&[1, 2, 3]), [0]);
    }

    #[test]
    fn losing_one_of_two_equal_blocks_leaves_the_other_matched() {
        for gone in [4, 5] {
            let mut f = Fixture::new(!0);
            f.publish(4, None, [1, 2]);
            f.publish(5, None, [1, 2]);
            f.publish(6, Some(5), [3, 4]);
            let mut dropped = Vec::new();
            f.index.withdraw(gone, &mut dropped);
            assert_eq!(dropped, [0; 0]);
            assert_eq!(f.walk(&[1, 2, 3, 4]), [9 - gone, 6]);
        }
    }

    #[test]
    fn what_stands_behind_a_lost_prefix_leaves_with_it() {
        let mut f = Fixture::new(!0);
        f.publish(0, None, [1, 2]);
        f.publish(1, Some(0), [3, 4]);
        f.publish(2, Some(0), [5, 6]);
        f.publish(3, Some(2), [7, 8]);
        let mut dropped = Vec::new();
        f.index.withdraw(0, &mut dropped);
        dropped.sort_unstable();
        assert_eq!(dropped, [1, 2, 3]);
        assert_eq!(f.index.counts(), (0, 0));
        assert_eq!(f.walk(&[1, 2]), [0; 0]);
        f.publish(0, None, [1, 2]);
        assert_eq!(f.walk(&[1, 2, 3, 4]), [0]);
    }

    #[test]
    fn a_leaf_is_evicted_before_what_it_stands_behind() {
        let mut f = Fixture::new(!0);
        f.publish(0, None, [1, 2]);
        f.publish(1, Some(0), [3, 4]);
        f.publish(2, Some(1), [5, 6]);
        f.publish(3, Some(0), [7, 8]);
        assert_eq!(f.index.behind(1, |_| true), Some(2));
        assert_eq!(f.index.behind(2, |_| true), None);
        assert_eq!(f.index.behind(0, |block| block == 2), Some(2));
        assert_eq!(f.index.behind(0, |block| block == 3), Some(3));
        assert_eq!(f.index.behind(0, |_| false), None);
        // Another holder keeps what stands behind findable.
        f.publish(4, None, [1, 2]);
        assert_eq!(f.index.behind(0, |_| true), None);
    }

    #[test]
    fn a_moved_block_is_found_where_it_is() {
        let mut f = Fixture::new(!0);
        f.publish(0, None, [1, 2]);
        f.publish(1, None, [1, 2]);
        f.publish(2, Some(0), [3, 4]);
        for (old, new) in [(0, 8), (1, 9), (2, 10)] {
            f.store.copy(old, new, 2);
            f.index.repoint(old, new);
            f.index.check(&f.store, new).unwrap();
        }
        assert_eq!(f.walk(&[1, 2, 3, 4]), [8, 10]);
    }

    #[test]
    fn a_block_behind_an_unpublished_one_is_not_published() {
        let mut f = Fixture::new(!0);
        assert!(!f.index.publish(&f.store, 3, Some(2), None));
        assert!(!f.index.is_published(3));
    }
}
