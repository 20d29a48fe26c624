//! What a serving engine claims and gives back, call by call.
//!
//! ```text
//! pool 90112 16             blocks, tokens a block
//! open 17 12999             a prompt of so many tokens: all of its blocks are claimed
//! grow 17 13009 4 801 ...   sequences that need a block more for so many tokens, in one step
//! close 17                  all blocks of a sequence are given back
//! ```
//!
//! What lives here: reading such a file (`benches/pages.py` writes it). What never lives here: a
//! serving loop; whose blocks they are.

use std::collections::HashMap;

/// A call of the engine. Sequences are numbered once and for all.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    /// A prompt comes.
    Open { sequence: i64, tokens: u32 },
    /// Sequences grow to so many tokens, each into at least one more block.
    Grow(Vec<(i64, u32)>),
    /// A sequence ends.
    Close { sequence: i64 },
}

/// A whole load, checked: sequences are open when they grow or end, and none shrinks.
#[derive(Debug, PartialEq, Eq)]
pub struct Load {
    /// Blocks of the pool.
    pub blocks: u32,
    /// Tokens a block.
    pub block_size: u32,
    /// The calls, in order.
    pub calls: Vec<Call>,
}

impl Load {
    /// Reads the text above. The error names the line.
    pub fn read(text: &str) -> Result<Self, String> {
        let mut lines = text.lines().enumerate();
        let head: Vec<&str> = lines
            .next()
            .map_or(Vec::new(), |(_, line)| line.split(' ').collect());
        let ["pool", blocks, block_size] = head[..] else {
            return Err("line 1: expected \"pool BLOCKS BLOCK_SIZE\"".into());
        };
        let positive = |word: &str| number(word).filter(|&n| n > 0);
        let (Some(blocks), Some(block_size)) = (positive(blocks), positive(block_size)) else {
            return Err("line 1: blocks and tokens a block are whole numbers above 0".into());
        };
        let mut load = Self {
            blocks,
            block_size,
            calls: Vec::new(),
        };
        let mut open = HashMap::new();
        for (at, line) in lines {
            let call = call(line)
                .ok_or_else(|| format!("line {}: no call: {line:.60}", at + 1))
                .and_then(|call| match load.apply(&call, &mut open) {
                    Ok(()) => Ok(call),
                    Err(reason) => Err(format!("line {}: {reason}", at + 1)),
                })?;
            load.calls.push(call);
        }
        Ok(load)
    }

    /// Blocks of so many tokens.
    pub fn blocks_of(&self, tokens: u32) -> u32 {
        tokens.div_ceil(self.block_size)
    }

    /// Keeps the lengths of open sequences; says what is wrong with a call.
    fn apply(&self, call: &Call, open: &mut HashMap<i64, u32>) -> Result<(), String> {
        match call {
            Call::Open { sequence, tokens } => match open.insert(*sequence, *tokens) {
                Some(_) => Err(format!("sequence {sequence} is open already")),
                None if *tokens == 0 => Err(format!("sequence {sequence} has no tokens")),
                None => Ok(()),
            },
            Call::Grow(rows) => rows.iter().try_for_each(|&(sequence, tokens)| {
                let before = (open.get_mut(&sequence))
                    .ok_or_else(|| format!("sequence {sequence} is not open"))?;
                if self.blocks_of(tokens) <= self.blocks_of(*before) {
                    return Err(format!(
                        "sequence {sequence} has {before} tokens, {tokens} need no more blocks"
                    ));
                }
                *before = tokens;
                Ok(())
            }),
            Call::Close { sequence } => match open.remove(sequence) {
                Some(_) => Ok(()),
                None => Err(format!("sequence {sequence} is not open")),
            },
        }
    }
}

fn number<N: std::str::FromStr>(word: &str) -> Option<N> {
    word.parse().ok()
}

fn call(line: &str) -> Option<Call> {
    let words: Vec<&str> = line.split(' ').collect();
    match words[..] {
        ["open", sequence, tokens] => Some(Call::Open {
            sequence: number(sequence)?,
            tokens: number(tokens)?,
        }),
        ["close", sequence] => Some(Call::Close {
            sequence: number(sequence)?,
        }),
        ["grow", ref rows @ ..] if !rows.is_empty() && rows.len().is_multiple_of(2) => {
            let rows = rows.chunks_exact(2);
            rows.map(|row| Some((number(row[0])?, number(row[1])?)))
                .collect::<Option<_>>()
                .map(Call::Grow)
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_load_is_read_as_it_was_written() {
        let text = "pool 64 16\nopen 7 33\nopen 9 16\ngrow 7 49 9 17\nclose 7\n";
        let load = Load::read(text).expect("a good load");
        assert_eq!((load.blocks, load.block_size), (64, 16));
        assert_eq!(load.calls[2], Call::Grow(vec![(7, 49), (9, 17)]));
        assert_eq!(load.calls[3], Call::Close { sequence: 7 });
    }

    #[test]
    fn what_no_engine_can_have_done_is_refused_with_its_line() {
        for (text, said) in [
            ("", "line 1"),
            ("pool 0 16", "line 1"),
            ("pool 64 16\nopen 7", "line 2: no call"),
            ("pool 64 16\nopen 7 0", "line 2: sequence 7 has no tokens"),
            (
                "pool 64 16\nopen 7 1\nopen 7 1",
                "line 3: sequence 7 is open",
            ),
            ("pool 64 16\nclose 7", "line 2: sequence 7 is not open"),
            ("pool 64 16\ngrow 7 20", "line 2: sequence 7 is not open"),
            (
                "pool 64 16\nopen 7 17\ngrow 7 32",
                "line 3: sequence 7 has 17",
            ),
            ("pool 64 16\nopen 7 17\ngrow 7", "line 3: no call"),
        ] {
            let error = Load::read(text).expect_err(text);
            assert!(error.starts_with(said), "{text:?}: {error}");
        }
    }
}
