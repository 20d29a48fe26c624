//! Moves that have begun, as a value that travels: to a thread, or as bytes to another process.
//!
//! ```text
//!  bytes   8  magic and format version   8  manager   8  epoch   8  count
//!          8 x count  source, destination   8  XXH3-64 of all before      (all little-endian)
//! ```

use crate::error::{Error, Result};

const MAGIC: u64 = u64::from_le_bytes(*b"kvmmu-m1");

/// Moves that have begun: (source, destination) of each. No destination is a source, or twice in
/// it, so they may be copied in any order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moves {
    /// Which manager of its process began them.
    pub(super) uid: u64,
    pub(super) epoch: u64,
    pub(super) pairs: Vec<[u32; 2]>,
}

impl Moves {
    /// Number of the transaction.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// (source, destination) of every move.
    pub fn pairs(&self) -> &[[u32; 2]] {
        &self.pairs
    }

    /// The moves as bytes.
    pub fn to_bytes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(40 + 8 * self.pairs.len());
        for word in [MAGIC, self.uid, self.epoch, self.pairs.len() as u64] {
            out.extend(word.to_le_bytes());
        }
        out.extend(
            self.pairs
                .iter()
                .flatten()
                .flat_map(|block| block.to_le_bytes()),
        );
        let sum = xxhash_rust::xxh3::xxh3_64(&out);
        out.extend(sum.to_le_bytes());
        out
    }

    /// Reads [`Moves::to_bytes`]; refuses bytes that are not whole and unchanged.
    pub fn from_bytes(data: &[u8]) -> Result<Self> {
        let bad = |what: String| Error::InvalidPlan(format!("not the bytes of moves: {what}"));
        let word = |at: usize| -> Option<u64> {
            Some(u64::from_le_bytes(data.get(at..at + 8)?.try_into().ok()?))
        };
        if data.len() < 40 || !data.len().is_multiple_of(8) {
            return Err(bad(format!("{} bytes", data.len())));
        }
        let end = data.len() - 8;
        if word(0) != Some(MAGIC) {
            return Err(bad("another format or version".into()));
        }
        if word(end) != Some(xxhash_rust::xxh3::xxh3_64(&data[..end])) {
            return Err(bad("the checksum differs".into()));
        }
        let field = |at| word(at).unwrap_or(0);
        let (uid, epoch, count) = (field(8), field(16), field(24));
        if count != (data.len() as u64 - 40) / 8 {
            return Err(bad(format!("{count} moves in {} bytes", data.len())));
        }
        let block = |pair: &[u8], at: usize| {
            u32::from_le_bytes([pair[at], pair[at + 1], pair[at + 2], pair[at + 3]])
        };
        let pairs = data[32..end]
            .chunks_exact(8)
            .map(|pair| [block(pair, 0), block(pair, 4)]);
        Ok(Self {
            uid,
            epoch,
            pairs: pairs.collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_flipped_or_missing_byte_is_noticed() {
        let moves = Moves {
            uid: 3,
            epoch: 7,
            pairs: vec![[1, 2], [u32::MAX - 1, 9]],
        };
        let bytes = moves.to_bytes();
        assert_eq!(Moves::from_bytes(&bytes), Ok(moves));
        for at in 0..bytes.len() {
            let mut flipped = bytes.clone();
            flipped[at] ^= 0x40;
            assert!(Moves::from_bytes(&flipped).is_err(), "byte {at}");
            assert!(Moves::from_bytes(&bytes[..at]).is_err(), "length {at}");
        }
    }
}
