//! `append`: known tokens at the end of one sequence.

use super::write::Row;
use crate::error::Result;
use crate::state::Mmu;

impl Mmu {
    /// Extends a sequence by known tokens and makes the places that they go to writable. All or
    /// nothing.
    ///
    /// Returns the copies (source, destination) to carry out before the next step or move.
    pub fn append(&self, id: i64, tokens: &[i32]) -> Result<Vec<[u32; 2]>> {
        let _gate = self.enter();
        let (slot, sequence) = self.sequence(id)?;
        let (from, space) = (sequence.tokens, sequence.space);
        let blocks = self.checked_blocks(from, tokens.len())?;
        let mapped = self.blocks_for(from);
        self.table.reserve(space, mapped, blocks, mapped == 0)?;

        let to = from + tokens.len() as u32;
        let row = Row {
            id,
            slot,
            sequence,
            from,
            to,
            tokens_after: to,
            writes: Vec::new(),
            fresh: Vec::new(),
        };
        let mut rows = [row];
        let mut shared = None;
        let needed = self.plan_writes(&mut rows, &mut shared);
        let reserved = match self.reserve_with(needed.copies + needed.growth, &mut shared) {
            Ok(reserved) => reserved,
            Err(error) => {
                let error = self.shrink_back(&mut rows, error);
                self.table.trim(space, mapped, blocks, mapped == 0);
                return Err(error);
            }
        };
        let claim = self.complete(reserved, shared.as_deref_mut());
        let into = self.claim_rows(&mut rows, &needed, claim, shared.as_deref_mut());
        let mut copies = Vec::new();
        self.grow(
            None,
            &mut rows[0],
            shared.as_deref_mut(),
            &mut into.into_iter(),
            Some(tokens),
            &mut copies,
        );
        Ok(copies)
    }
}
