//! Takes the docstrings out of `python/kvmmu/_core.pyi`, so that the binding carries them without a
//! second copy: `OUT_DIR/texts/MMU.open` is what `help(MMU.open)` shows, `OUT_DIR/texts/_core` the
//! text of the module. The macro `text!` of `lib.rs` puts them where they belong.
//!
//! Read by indentation, as far as that file needs it: classes, functions, and the docstring that is
//! the first statement of each. A text that no item carries is found by `tests/test_docs.py`.

use std::fs;
use std::path::{Path, PathBuf};

const STUB: &str = "../../python/kvmmu/_core.pyi";
const QUOTES: &str = "\"\"\"";

fn main() {
    println!("cargo:rerun-if-changed={STUB}");
    println!("cargo:rerun-if-changed=build.rs");
    let out = std::env::var_os("OUT_DIR").expect("cargo sets it");
    let folder = PathBuf::from(out).join("texts");
    // Those of an earlier run that are gone from the stub must not be found.
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder).expect("OUT_DIR is cargo's own");
    let stub = fs::read_to_string(Path::new(STUB)).unwrap_or_else(|e| panic!("{STUB}: {e}"));
    for (name, text) in texts(&stub) {
        let file = folder.join(&name);
        assert!(!file.exists(), "{STUB}: {name} is there twice");
        fs::write(&file, text).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    }
}

/// Whose docstring may stand in the next line.
enum Next {
    /// Nobody's.
    None,
    /// The module's or that of the innermost name: its head is complete.
    Body,
    /// The head of the innermost name goes on.
    Head,
}

/// Dotted names and their docstrings, in order.
fn texts(stub: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    // Names around the line, with how far each is indented.
    let mut around: Vec<(usize, &str)> = Vec::new();
    let mut next = Next::Body;
    let mut lines = stub.lines();
    while let Some(line) = lines.next() {
        let code = line.trim();
        if code.is_empty() {
            continue;
        }
        if let Some(first) = code.strip_prefix(QUOTES) {
            let text = docstring(first, &mut lines);
            if matches!(next, Next::Body) {
                let names: Vec<&str> = around.iter().map(|&(_, name)| name).collect();
                let name = match names[..] {
                    [] => "_core".to_owned(),
                    _ => names.join("."),
                };
                found.push((name, text));
            }
            next = Next::None;
            continue;
        }
        if !matches!(next, Next::Head) {
            next = Next::None;
            let head = (code.strip_prefix("class ")).or_else(|| code.strip_prefix("def "));
            let Some(head) = head else { continue };
            let indent = line.len() - line.trim_start().len();
            around.retain(|&(outer, _)| outer < indent);
            let name = head.split(['(', ':']).next().expect("split gives one");
            around.push((indent, name));
        }
        // A head ends with its colon; `...` behind it means that there is no docstring.
        next = match code {
            _ if code.ends_with(": ...") => Next::None,
            _ if code.ends_with(':') => Next::Body,
            _ => Next::Head,
        };
    }
    found
}

/// The docstring that begins with `first`, up to its end, dedented as `inspect.cleandoc` does.
fn docstring<'a>(first: &'a str, lines: &mut impl Iterator<Item = &'a str>) -> String {
    let mut text = Vec::new();
    let mut line = first;
    while !line.contains(QUOTES) {
        text.push(line);
        line = (lines.next()).unwrap_or_else(|| panic!("{STUB}: {first:?} has no end"));
    }
    let (last, behind) = line.split_once(QUOTES).expect("it was found");
    assert!(behind.is_empty(), "{STUB}: {behind:?} behind a docstring");
    text.push(last);
    let strange = text.iter().find(|line| line.contains(['\\', '\t', '\0']));
    assert!(
        strange.is_none(),
        "{STUB}: tabs and escapes are not read: {strange:?}"
    );
    let indented = text.iter().skip(1).filter(|line| !line.trim().is_empty());
    let margin = indented
        .map(|line| line.len() - line.trim_start().len())
        .min();
    for (at, line) in text.iter_mut().enumerate() {
        *line = match at {
            0 => line.trim_start(),
            _ => line.get(margin.unwrap_or(0)..).unwrap_or(""),
        };
    }
    let blank = |line: &&str| line.is_empty();
    let from = text.iter().take_while(|line| blank(line)).count();
    let behind = text[from..].iter().rev().take_while(|line| blank(line));
    let to = text.len() - behind.count();
    text[from..to].join("\n")
}
