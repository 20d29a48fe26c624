//! What becomes of published blocks, in order, for routers that know which prefix is where.
//!
//! What lives here: a ring of the last changes of the prefix index, each with its number. What never
//! lives here: who reads them, and how far somebody has.
//!
//! - Numbers count from 0 and have no gaps. The ring holds the last of them; who asks for an older
//!   one is told how many are lost, and starts again from what is published now.
//! - One change is noted where the index itself changes, under the shared lock, so the order of
//!   events is the order of changes, and events up to a number are the index at that moment.
//! - Nothing is noted, and nothing is allocated, unless the manager was made with room for events.

use super::hash;
use crate::error::{Error, Result};
use crate::sync::{filled, reserved};

/// What became of a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// It can be found by the prefix that it holds.
    Stored,
    /// It can no longer be found.
    Removed,
    /// Its content is found in another block from now on.
    Moved,
}

/// One change of the prefix index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub kind: Kind,
    /// To which block.
    pub block: u32,
    /// Where it moved.
    pub moved_to: Option<u32>,
    /// Chained hash of the block's content behind its prefix.
    pub hash: u128,
    /// Hash of the prefix in front; 0: it is the first block of a prompt.
    pub parent: u128,
    pub(super) key: Option<Box<[u8]>>,
}

impl Event {
    /// Salt and extra bytes that belong to a stored block beside its tokens; `None` for most.
    pub fn key(&self) -> Option<(&[u8], Option<&[u8]>)> {
        self.key.as_deref().map(hash::parts)
    }
}

/// A stretch of events.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Events {
    /// Tokens a block.
    pub block_size: usize,
    /// Number of the first.
    pub first: u64,
    /// Events that were asked for and are no longer known.
    pub lost: u64,
    /// Number of the next event, from which to ask again.
    pub next: u64,
    /// In order.
    pub events: Vec<Event>,
    /// Of each event `block_size` tokens; zeros unless it is [`Kind::Stored`].
    pub tokens: Vec<i32>,
}

/// The ring.
#[derive(Debug)]
pub(super) struct Log {
    block_size: usize,
    capacity: usize,
    /// Event `n` stands at `n % capacity`.
    events: Vec<Event>,
    tokens: Box<[i32]>,
    next: u64,
}

impl Log {
    pub(super) fn new(capacity: usize, block_size: usize) -> Result<Self> {
        Ok(Self {
            block_size,
            capacity,
            events: reserved(capacity)?,
            tokens: filled(0, capacity * block_size)?,
            next: 0,
        })
    }

    pub(super) fn next(&self) -> u64 {
        self.next
    }

    pub(super) fn stored(
        &mut self,
        block: u32,
        (hash, parent): (u128, u128),
        tokens: &[i32],
        key: Option<Box<[u8]>>,
    ) {
        let at = self.push(Event {
            kind: Kind::Stored,
            block,
            moved_to: None,
            hash,
            parent,
            key,
        });
        let start = at * self.block_size;
        self.tokens[start..start + self.block_size].copy_from_slice(tokens);
    }

    pub(super) fn removed(&mut self, block: u32, (hash, parent): (u128, u128)) {
        self.push(Event {
            kind: Kind::Removed,
            block,
            moved_to: None,
            hash,
            parent,
            key: None,
        });
    }

    pub(super) fn moved(&mut self, block: u32, to: u32, (hash, parent): (u128, u128)) {
        self.push(Event {
            kind: Kind::Moved,
            block,
            moved_to: Some(to),
            hash,
            parent,
            key: None,
        });
    }

    /// Where it stands.
    fn push(&mut self, event: Event) -> usize {
        let at = (self.next % self.capacity as u64) as usize;
        self.next += 1;
        if at == self.events.len() {
            self.events.push(event);
        } else {
            self.events[at] = event;
        }
        at
    }

    pub(super) fn since(&self, since: u64) -> Result<Events> {
        if since > self.next {
            return Err(Error::InvalidConfig(format!(
                "since = {since}: allowed is 0 to {}, the number of the next event",
                self.next
            )));
        }
        let first = since.max(self.next - self.events.len() as u64);
        let count = (self.next - first) as usize;
        let mut found = Events {
            block_size: self.block_size,
            first,
            lost: first - since,
            next: self.next,
            events: Vec::with_capacity(count),
            tokens: Vec::with_capacity(count * self.block_size),
        };
        for number in first..self.next {
            let at = (number % self.capacity as u64) as usize;
            let event = self.events[at].clone();
            if event.kind == Kind::Stored {
                let start = at * self.block_size;
                let tokens = &self.tokens[start..start + self.block_size];
                found.tokens.extend_from_slice(tokens);
            } else {
                found.tokens.resize(found.tokens.len() + self.block_size, 0);
            }
            found.events.push(event);
        }
        Ok(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blocks(events: &Events) -> Vec<u32> {
        events.events.iter().map(|event| event.block).collect()
    }

    #[test]
    fn a_gap_is_told_and_numbers_go_on() {
        let mut log = Log::new(4, 2).unwrap();
        for block in 0..6 {
            log.stored(block, (1, 0), &[block as i32, 9], None);
        }
        let all = log.since(0).unwrap();
        assert_eq!((all.first, all.lost, all.next), (2, 2, 6));
        assert_eq!(blocks(&all), [2, 3, 4, 5]);
        assert_eq!(all.tokens, [2, 9, 3, 9, 4, 9, 5, 9]);
        let last = log.since(5).unwrap();
        assert_eq!((last.first, last.lost, blocks(&last)), (5, 0, vec![5]));
        let none = log.since(6).unwrap();
        assert_eq!(
            (none.first, none.lost, none.next, none.events.len()),
            (6, 0, 6, 0)
        );
        assert!(log.since(7).is_err());
    }

    #[test]
    fn what_is_not_stored_carries_no_tokens_of_what_stood_there_before() {
        let mut log = Log::new(1, 2).unwrap();
        log.stored(3, (1, 0), &[5, 6], None);
        log.moved(3, 4, (1, 0));
        let found = log.since(1).unwrap();
        assert_eq!(found.tokens, [0, 0]);
        assert_eq!(found.events[0].moved_to, Some(4));
    }
}
