//! Rows that begin with the same blocks, as two levels for cascade attention (FlashInfer's
//! `MultiLevelCascadeAttentionWrapper`): what a group of neighbouring rows shares is read once for
//! all of them, and each row's rest for itself.
//!
//! What lives here: which rows form a group, and the two CSRs. What never lives here: rows.
//!
//! Level 0 is computed without a causal mask, so it must end before the first query of each of its
//! rows: it takes full entries of tokens that came before the step only. Hence it never holds a last
//! block that is not full, and every row with a query keeps that query's entry for itself.
//!
//! Rows are grouped so that the entries which need not be read again, (rows - 1) x shared summed over
//! the groups, are the most there can be: two neighbours may share a system prompt with the rest of
//! the batch, and far more with each other. Found by dynamic programming over where the last group
//! begins; the shared part of a group is the least that two neighbours in it share, because equal
//! prefixes are transitive. Time: compares each entry once with the row above, then
//! rows x (rows of the longest chain of sharing neighbours).

use super::rows::{RowBuffers, Rows};
use crate::error::{Error, Result};

/// Output buffers of one level, int32.
#[derive(Debug)]
pub struct CascadeLevel<'a> {
    /// `[n + 1]`: where the query tokens of each group (level 0) or row (level 1) begin.
    pub qo_indptr: &'a mut [i32],
    /// `[n + 1]`: where its entries begin in `kv_indices`.
    pub kv_indptr: &'a mut [i32],
    /// `[k]`: entries, as in the rows.
    pub kv_indices: &'a mut [i32],
    /// `[n]`: tokens in the last entry, 0 where there is none.
    pub kv_last_page_len: &'a mut [i32],
}

/// Output buffers of both levels. Larger ones are left alone behind what is written.
#[derive(Debug)]
pub struct Cascade<'a> {
    /// `[groups + 1]`: where the rows of each group begin.
    pub row_indptr: &'a mut [i32],
    /// Level 0: what the rows of a group share. A row that shares nothing is a group of its own,
    /// without entries.
    pub shared: CascadeLevel<'a>,
    /// Level 1: the rest of each row.
    pub own: CascadeLevel<'a>,
}

/// How much was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CascadeSizes {
    /// Groups.
    pub groups: usize,
    /// Rows.
    pub rows: usize,
    /// Entries of level 0.
    pub shared: usize,
    /// Entries of level 1.
    pub own: usize,
}

/// Neighbouring rows, the first and the one behind the last, and the entries they share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Group {
    first: usize,
    end: usize,
    shared: usize,
}

impl Rows {
    /// Groups the rows of the last `prepare` by common prefixes of at least one full entry. An
    /// error (and nothing written) where an export has changed rows or lengths since, or where a
    /// buffer is too small.
    pub fn prefix_groups(
        &self,
        buffers: &RowBuffers<'_>,
        out: &mut Cascade<'_>,
    ) -> Result<CascadeSizes> {
        let (rows, full) = self.before_step(buffers)?;
        let common: Vec<usize> = (1..rows)
            .map(|row| {
                let most = full(row - 1).min(full(row));
                let [above, below] =
                    [row - 1, row].map(|row| &self.entries_of(buffers, row)[..most]);
                // (Padding in front stands for what was released: nothing to share.)
                let released = above.first() == Some(&self.null_entry());
                if released {
                    0
                } else {
                    common_prefix(above, below)
                }
            })
            .collect();
        let groups = group(rows, &common);
        let sizes = self.sizes(buffers, &groups);
        check(out, &sizes)?;

        let starts = &*buffers.query_start_loc;
        out.row_indptr[0] = 0;
        let mut shared = Writer::new(&mut out.shared, starts[0]);
        let mut own = Writer::new(&mut out.own, starts[0]);
        for (number, group) in groups.iter().enumerate() {
            out.row_indptr[number + 1] = group.end as i32;
            let all = self.entries_of(buffers, group.first);
            let tokens = group.shared as i32 * self.entry_tokens() as i32;
            shared.push(self, starts[group.end], &all[..group.shared], tokens);
            for row in group.first..group.end {
                let rest = &self.entries_of(buffers, row)[group.shared..];
                own.push(self, starts[row + 1], rest, buffers.seq_lens[row] - tokens);
            }
        }
        Ok(sizes)
    }

    fn sizes(&self, buffers: &RowBuffers<'_>, groups: &[Group]) -> CascadeSizes {
        let rows = self.num_rows();
        let all: usize = (0..rows)
            .map(|row| self.entries_of(buffers, row).len())
            .sum();
        let twice: usize = (groups.iter())
            .map(|group| (group.end - group.first) * group.shared)
            .sum();
        CascadeSizes {
            groups: groups.len(),
            rows,
            shared: groups.iter().map(|group| group.shared).sum(),
            own: all - twice,
        }
    }
}

/// Writes one level.
struct Writer<'a, 'b> {
    level: &'a mut CascadeLevel<'b>,
    n: usize,
    at: usize,
}

impl<'a, 'b> Writer<'a, 'b> {
    fn new(level: &'a mut CascadeLevel<'b>, first_query: i32) -> Self {
        level.qo_indptr[0] = first_query;
        level.kv_indptr[0] = 0;
        Self { level, n: 0, at: 0 }
    }

    fn push(&mut self, rows: &Rows, query_end: i32, entries: &[i32], tokens: i32) {
        let end = self.at + entries.len();
        self.level.kv_indices[self.at..end].copy_from_slice(entries);
        self.level.kv_last_page_len[self.n] = rows.last_len(tokens, entries.len());
        (self.n, self.at) = (self.n + 1, end);
        self.level.qo_indptr[self.n] = query_end;
        self.level.kv_indptr[self.n] = end as i32;
    }
}

fn check(out: &Cascade<'_>, sizes: &CascadeSizes) -> Result<()> {
    let level = |level: &CascadeLevel<'_>, n: usize, entries: usize| {
        [
            ("qo_indptr", level.qo_indptr.len(), n + 1),
            ("kv_indptr", level.kv_indptr.len(), n + 1),
            ("kv_indices", level.kv_indices.len(), entries),
            ("kv_last_page_len", level.kv_last_page_len.len(), n),
        ]
    };
    let rows = [("row_indptr", out.row_indptr.len(), sizes.groups + 1)];
    let mut all = rows
        .into_iter()
        .chain(level(&out.shared, sizes.groups, sizes.shared))
        .chain(level(&out.own, sizes.rows, sizes.own));
    match all.find(|&(_, is, least)| is < least) {
        Some((what, limit, needed)) => Err(Error::LimitExceeded {
            what,
            needed: needed as u64,
            limit: limit as u64,
        }),
        None => Ok(()),
    }
}

/// Entries that two rows of the same length begin with alike.
fn common_prefix(above: &[i32], below: &[i32]) -> usize {
    const AT_ONCE: usize = 64;
    let pairs = above.chunks(AT_ONCE).zip(below.chunks(AT_ONCE));
    let same = pairs.take_while(|(above, below)| above == below).count() * AT_ONCE;
    let same = same.min(above.len());
    let rest = above[same..].iter().zip(&below[same..]);
    same + rest.take_while(|(above, below)| above == below).count()
}

/// Cuts rows into groups; `common[i]` entries are what row `i` and the next share.
fn group(rows: usize, common: &[usize]) -> Vec<Group> {
    // best[n]: what the first n rows save at most, and the last of their groups.
    let alone = |row: usize| Group {
        first: row,
        end: row + 1,
        shared: 0,
    };
    let mut best: Vec<(usize, Group)> = Vec::with_capacity(rows + 1);
    best.push((0, alone(0)));
    for row in 0..rows {
        let mut found = (best[row].0, alone(row));
        let mut shared = usize::MAX;
        for first in (0..row).rev() {
            shared = shared.min(common[first]);
            if shared == 0 {
                break;
            }
            let saved = best[first].0 + (row - first) * shared;
            if saved >= found.0 {
                let end = row + 1;
                found = (saved, Group { first, end, shared });
            }
        }
        best.push(found);
    }
    let mut groups = Vec::new();
    let mut end = rows;
    while end > 0 {
        let group = best[end].1;
        groups.push(group);
        end = group.first;
    }
    groups.reverse();
    groups
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn shapes(rows: usize, common: &[usize]) -> Vec<(usize, usize, usize)> {
        let each = |group: Group| (group.first, group.end, group.shared);
        group(rows, common).into_iter().map(each).collect()
    }

    #[test]
    fn neighbours_are_grouped_by_what_need_not_be_read_again() {
        assert_eq!(shapes(0, &[]), []);
        assert_eq!(shapes(1, &[]), [(0, 1, 0)]);
        assert_eq!(shapes(3, &[0, 0]), [(0, 1, 0), (1, 2, 0), (2, 3, 0)]);
        assert_eq!(shapes(3, &[4, 4]), [(0, 3, 4)]);
        assert_eq!(shapes(4, &[4, 0, 1]), [(0, 2, 4), (2, 4, 1)]);
        // A system prompt of 10 for all, and 50 and 60 for either half.
        let halves = [50, 50, 10, 60, 60];
        assert_eq!(shapes(6, &halves), [(0, 3, 50), (3, 6, 60)]);
        assert_eq!(shapes(4, &[5, 6, 100]), [(0, 2, 5), (2, 4, 100)]);
    }

    proptest! {
        #[test]
        fn no_other_grouping_saves_more(common in proptest::collection::vec(0usize..6, 0..9)) {
            let rows = common.len() + 1;
            let saved = |groups: &[(usize, usize, usize)]| -> usize {
                groups.iter().map(|(first, end, shared)| (end - first - 1) * shared).sum()
            };
            let mut most = 0;
            for cuts in 0..1usize << common.len() {
                let mut groups = vec![(0, 1, usize::MAX)];
                for (i, &shared) in common.iter().enumerate() {
                    match groups.last_mut() {
                        Some(last) if cuts >> i & 1 == 0 => {
                            *last = (last.0, i + 2, last.2.min(shared));
                        }
                        _ => groups.push((i + 1, i + 2, usize::MAX)),
                    }
                }
                groups.retain(|group| group.2 != usize::MAX);
                most = most.max(saved(&groups));
            }
            let found = shapes(rows, &common);
            prop_assert_eq!(saved(&found), most);
            let mut next = 0;
            for (first, end, shared) in found {
                prop_assert_eq!(first, next);
                prop_assert!(common[first..end - 1].iter().all(|&most| shared <= most));
                prop_assert_eq!(shared > 0, end - first > 1);
                next = end;
            }
            prop_assert_eq!(next, rows);
        }

        #[test]
        fn prefixes_are_compared_to_the_first_difference(
            at in 0usize..200, len in 0usize..200,
        ) {
            let above: Vec<i32> = (0..len as i32).collect();
            let mut below = above.clone();
            if at < len {
                below[at] = -1;
            }
            prop_assert_eq!(common_prefix(&above, &below), at.min(len));
        }
    }
}
