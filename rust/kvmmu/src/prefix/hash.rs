//! The chained hash of a block and the key of what its tokens do not say.
//!
//! A 128-bit XXH3 over (parent's hash, tokens, key): equal for equal configurations in every
//! process and on every machine (a golden value is tested). It only has to be fast and well spread:
//! a hit compares parent, tokens and key themselves, so a collision costs a miss, never a wrong
//! block.

use std::collections::HashMap;

use xxhash_rust::xxh3::{xxh3_128, xxh3_128_with_seed};

/// What tells prompts apart beside their tokens.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Keys {
    /// Keeps tenants or adapters apart; part of the first block and so of the whole chain.
    pub salt: Box<[u8]>,
    /// Block index to bytes that the tokens of that block do not say (an image behind
    /// placeholders, for instance).
    pub extra: HashMap<u32, Box<[u8]>>,
}

impl Keys {
    /// The key of one block, `None` for nearly all of them.
    pub(crate) fn of(&self, index: u32) -> Option<Box<[u8]>> {
        let salt: &[u8] = if index == 0 { &self.salt } else { &[] };
        let extra = if self.extra.is_empty() {
            None
        } else {
            self.extra.get(&index)
        };
        if salt.is_empty() && extra.is_none() {
            return None;
        }
        // The length in front keeps salt and extra bytes from running into each other.
        let mut key = Vec::with_capacity(9 + salt.len() + extra.map_or(0, |bytes| bytes.len()));
        key.extend((salt.len() as u64).to_le_bytes());
        key.extend(salt);
        key.push(u8::from(extra.is_some()));
        key.extend(extra.into_iter().flatten());
        Some(key.into())
    }
}

/// Salt and extra bytes that the key of a block was made of.
pub(super) fn parts(key: &[u8]) -> (&[u8], Option<&[u8]>) {
    let (length, rest) = key.split_at(8);
    let length = u64::from_le_bytes(length.try_into().expect("eight bytes"));
    let (salt, rest) = rest.split_at(length as usize);
    (salt, (rest[0] != 0).then_some(&rest[1..]))
}

/// Hash of the empty prefix.
pub(crate) const ROOT_HASH: u128 = 0;

/// Hash of a block behind a prefix. `scratch` is reused from call to call.
pub(crate) fn chain(
    parent: u128,
    tokens: &[i32],
    key: Option<&[u8]>,
    scratch: &mut Vec<u8>,
) -> u128 {
    scratch.clear();
    scratch.extend_from_slice(&parent.to_le_bytes());
    if cfg!(target_endian = "little") {
        scratch.extend_from_slice(bytemuck::cast_slice(tokens));
    } else {
        scratch.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
    }
    match key {
        None => xxh3_128(scratch),
        Some(key) => {
            scratch.extend_from_slice(key);
            xxh3_128_with_seed(scratch, 1 + tokens.len() as u64)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_is_the_same_in_every_process() {
        let mut scratch = Vec::new();
        let first = chain(ROOT_HASH, &[1, 2, 3, -4], None, &mut scratch);
        let second = chain(first, &[5, 6, 7, 8], Some(b"image"), &mut scratch);
        assert_eq!(first, GOLDEN.0, "{first:#x}");
        assert_eq!(second, GOLDEN.1, "{second:#x}");
    }
    const GOLDEN: (u128, u128) = (
        0xb84d5bf24c2f36d7e8126c07fe27efbf,
        0xef4816a099f942a12e63f27c5fc7f308,
    );

    #[test]
    fn salt_extra_and_tokens_have_domains_of_their_own() {
        let salted = Keys {
            salt: b"S".as_slice().into(),
            ..Keys::default()
        };
        let extra = Keys {
            extra: [(0, b"S".as_slice().into())].into(),
            ..Keys::default()
        };
        assert_ne!(salted.of(0), extra.of(0));
        assert_eq!(salted.of(1), None);
        assert_eq!(Keys::default().of(0), None);
        let key = salted.of(0).unwrap();
        assert_eq!(parts(&key), (b"S".as_slice(), None));
        let key = extra.of(0).unwrap();
        assert_eq!(parts(&key), (b"".as_slice(), Some(b"S".as_slice())));
        let mut scratch = Vec::new();
        let text = chain(ROOT_HASH, &[i32::from(b'S')], None, &mut scratch);
        let key = chain(ROOT_HASH, &[], salted.of(0).as_deref(), &mut scratch);
        assert_ne!(text, key);
    }
}
