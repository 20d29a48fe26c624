//! The state word of one block: which of the six states it is in, and how often it is held.
//!
//! What lives here: the bit layout and its transitions as pure functions. What never lives here:
//! memory; [`super::Pool`] keeps the words.
//!
//! ```text
//!  31..29  tag        0 in use (or empty: see below)  1 cached  2 fenced  3 destined  4 offline
//!                     5 in use by one owner
//!      28  published  an index of contents knows this block
//!      27  moving     source of a move in flight
//!  26..0   count      in use: references - 1 (a move in flight is one of them); else 0
//!  28..0   owner      with tag 5
//! ```
//!
//! The bit of the block in the pool's lines says `empty` or not; the word says the rest and is 0
//! for an empty block. A private block (one mapping, unpublished, not moving) has the word 0 too,
//! so claiming and releasing it touches the line only.

/// The six states. A block is in exactly one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Nobody's.
    Empty,
    /// Destination of a move in flight.
    Destined,
    /// Referenced at least once.
    InUse,
    /// Kept by the prefix index alone.
    Cached,
    /// Released, but a step in flight may still touch it.
    Fenced,
    /// Given back.
    Offline,
}

impl std::fmt::Display for State {
    /// As users know it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Empty => "empty",
            Self::Destined => "destined",
            Self::InUse => "in_use",
            Self::Cached => "cached",
            Self::Fenced => "fenced",
            Self::Offline => "offline",
        })
    }
}

const TAG_SHIFT: u32 = 29;
const CACHED: u32 = 1 << TAG_SHIFT;
const FENCED: u32 = 2 << TAG_SHIFT;
const DESTINED: u32 = 3 << TAG_SHIFT;
const OFFLINE: u32 = 4 << TAG_SHIFT;
const OWNED: u32 = 5 << TAG_SHIFT;
/// The tags of two words side by side.
pub(crate) const TAGS: u64 = 7 << TAG_SHIFT | 7 << (32 + TAG_SHIFT);
/// The top bits of the counts.
const HALVES: u64 = MOVES >> 1;
const MOVES: u64 = MOVING as u64 | (MOVING as u64) << 32;
const ONES: u64 = 1 | 1 << 32;
const PUBLISHED: u32 = 1 << 28;
const MOVING: u32 = 1 << 27;
const COUNT: u32 = MOVING - 1;

/// Most references of one block.
pub const MAX_REFERENCES: u32 = COUNT;
/// Largest owner number.
pub const MAX_OWNER: u32 = (1 << TAG_SHIFT) - 1;

/// One state word, by value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Word(pub(crate) u32);

impl Word {
    /// One mapping, nobody else knows it.
    pub(crate) const PRIVATE: Word = Word(0);
    pub(crate) const FENCED: Word = Word(FENCED);
    pub(crate) const DESTINED: Word = Word(DESTINED);
    pub(crate) const OFFLINE: Word = Word(OFFLINE);
    pub(crate) const CACHED: Word = Word(CACHED | PUBLISHED);

    /// Held once, by the owner of this number, who alone can release it.
    pub(crate) fn owned(owner: u32) -> Word {
        debug_assert!(owner <= MAX_OWNER);
        Word(OWNED | owner)
    }

    pub(crate) fn is_owned(self) -> bool {
        self.0 & (7 << TAG_SHIFT) == OWNED
    }

    /// State of a block whose line bit is set.
    pub(crate) fn state(self) -> State {
        const STATES: [State; 8] = [
            State::InUse,
            State::Cached,
            State::Fenced,
            State::Destined,
            State::Offline,
            State::InUse, // by one owner
            State::Offline,
            State::Offline,
        ];
        debug_assert!(self.0 >> TAG_SHIFT < 6, "tag of a block word: {self:?}");
        STATES[(self.0 >> TAG_SHIFT) as usize]
    }

    /// Whether both words have the same tag, so the same state.
    pub(crate) fn same_state(self, other: Word) -> bool {
        (self.0 ^ other.0) >> TAG_SHIFT == 0
    }

    pub(crate) fn is_published(self) -> bool {
        self.0 & PUBLISHED != 0 && !self.is_owned()
    }

    pub(crate) fn is_moving(self) -> bool {
        self.0 & MOVING != 0 && !self.is_owned()
    }

    /// Mappings, pins and moves (0 unless in use; a cached block under a move has 1).
    pub(crate) fn references(self) -> u32 {
        match self.state() {
            State::InUse if self.is_owned() => 1,
            State::InUse => (self.0 & COUNT) + 1,
            State::Cached => u32::from(self.is_moving()),
            _ => 0,
        }
    }

    /// Mappings and pins.
    pub(crate) fn holders(self) -> u32 {
        self.references() - u32::from(self.is_moving())
    }

    /// One more holder; a cached block comes back into use. `None` when the count is full.
    pub(crate) fn retained(self) -> Option<Word> {
        if self.0 >> TAG_SHIFT == 0 && self.0 & COUNT < MAX_REFERENCES - 1 {
            return Some(Word(self.0 + 1));
        }
        match self.state() {
            // The move's reference enters the count when the block comes back into use.
            State::Cached => Some(Word(
                (self.0 & (PUBLISHED | MOVING)) + u32::from(self.is_moving()),
            )),
            State::InUse if !self.is_owned() && self.references() < MAX_REFERENCES => {
                Some(Word(self.0 + 1))
            }
            _ => None,
        }
    }

    /// One holder less. `None`: it was the last reference and the block is the caller's to empty
    /// or fence.
    pub(crate) fn released(self) -> Option<Word> {
        if self.0 >> TAG_SHIFT == 0 && self.0 & COUNT > 0 && !self.is_moving() {
            return Some(Word(self.0 - 1));
        }
        debug_assert!(self.state() == State::InUse && self.holders() > 0);
        match (self.holders(), self.is_published()) {
            (1, true) => Some(Word(CACHED | (self.0 & (PUBLISHED | MOVING)))),
            (1, false) if !self.is_moving() => None,
            _ => Some(Word(self.0 - 1)),
        }
    }

    pub(crate) fn published(self) -> Word {
        debug_assert!(self.state() == State::InUse);
        Word(self.0 | PUBLISHED)
    }

    /// The prefix index forgets it. `None`: nothing else kept it.
    pub(crate) fn withdrawn(self) -> Option<Word> {
        match (self.state(), self.is_moving()) {
            (State::Cached, false) => None,
            // Only the move keeps it now: in use by that one reference.
            (State::Cached, true) => Some(Word(MOVING)),
            _ => Some(Word(self.0 & !PUBLISHED)),
        }
    }

    /// Becomes the source of a move.
    pub(crate) fn move_begun(self) -> Word {
        debug_assert!(!self.is_moving());
        match self.state() {
            State::Cached => Word(self.0 | MOVING),
            State::InUse => Word((self.0 | MOVING) + 1),
            state => unreachable!("a {state:?} block cannot begin to move"),
        }
    }

    /// The move's reference is given back. `None`: nothing else kept it.
    pub(crate) fn move_ended(self) -> Option<Word> {
        debug_assert!(self.is_moving());
        match self.state() {
            State::Cached => Some(Word(self.0 & !MOVING)),
            _ if self.holders() == 0 => None,
            _ => Some(Word((self.0 & !MOVING) - 1)),
        }
    }
}

/// Two words side by side with one holder more, if both are plainly in use.
pub(crate) fn both_retained(pair: u64) -> Option<u64> {
    // Half of the greatest count at most: then neither overflows.
    (pair & (TAGS | HALVES) == 0).then(|| pair + ONES)
}

/// Of two words side by side: 0 if neither has as many references as can be.
pub(crate) fn may_be_full(pair: u64) -> u64 {
    pair & HALVES
}

/// Of one word: 0 if one holder more is only an addition.
pub(crate) fn not_simply_retained(word: Word) -> u32 {
    word.0 & (TAGS | HALVES) as u32
}

/// Of one word: 0 if one holder less is only a subtraction.
pub(crate) fn not_simply_released(word: Word) -> u32 {
    // A count of 0 borrows, as far as the top bit.
    word.0 & (TAGS | MOVES) as u32 | (word.0 & COUNT).wrapping_sub(1) & 1 << 31
}

/// Two words side by side with one holder less, if both are plainly in use and keep one.
pub(crate) fn both_released(pair: u64) -> Option<u64> {
    let (low, high) = (pair as u32 & COUNT, (pair >> 32) as u32 & COUNT);
    (pair & (TAGS | MOVES) == 0 && low > 0 && high > 0).then(|| pair - ONES)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_counts_holders_and_the_move_apart() {
        let word = Word::PRIVATE.retained().unwrap().published().move_begun();
        assert_eq!((word.references(), word.holders()), (3, 2));
        let word = word.released().unwrap().released().unwrap();
        assert_eq!((word.state(), word.references()), (State::Cached, 1));
        let word = word.retained().unwrap();
        assert_eq!(
            (word.state(), word.references(), word.holders()),
            (State::InUse, 2, 1)
        );
        assert_eq!(word.move_ended().unwrap(), Word::PRIVATE.published());
    }

    #[test]
    fn the_last_reference_leaves_nothing_behind() {
        assert_eq!(Word::PRIVATE.released(), None);
        let moving = Word::PRIVATE.move_begun().released().unwrap();
        assert_eq!(
            (moving.state(), moving.references(), moving.holders()),
            (State::InUse, 1, 0)
        );
        assert_eq!(moving.move_ended(), None);
        let cached = Word::PRIVATE.published().released().unwrap();
        assert_eq!(cached.withdrawn(), None);
        assert_eq!(cached.move_begun().withdrawn().unwrap().references(), 1);
    }

    #[test]
    fn a_full_count_refuses_one_more() {
        let full = Word(MAX_REFERENCES - 1);
        assert_eq!(full.references(), MAX_REFERENCES);
        assert_eq!(full.retained(), None);
    }
}
