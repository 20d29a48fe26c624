//! The flight recorder's file: what an engine asked of its manager, call by call.
//!
//! What lives here: [`Body`], which encodes the arguments of a call; [`Recording`], which puts
//! records into frames and has a thread compress and write them. What never lives here: which calls
//! there are (the binding names them), and reading (`python/kvmmu/recorder.py`, which has the format
//! in words).
//!
//! ```text
//! file   = "KVMMUREC" | version u32 | length u32 | crc32 of the text u32 | text (JSON) | frame ...
//! frame  = "KFRM" | raw bytes u32 | stored bytes u32 | unix time in us u64
//!        | crc32 of the stored bytes u32 | crc32 of the 24 bytes before u32 | LZ4 block
//! record = operation u8 | length (LEB128) | body
//! ```
//!
//! Fixed numbers are little-endian. Records do not span frames, so a file that ends anywhere is
//! whole up to the end of a frame. A frame is closed when it has 256 KiB, after half a second, and
//! when somebody flushes.
//!
//! # Synchronization
//!
//! One mutex guards the open frame and the frames that wait; callers hold it for as long as it takes
//! to append a record. The thread takes frames out under it and compresses and writes without it.
//! Callers wait for room only when 64 frames (16 MiB) are behind.
//!
//! LZ4, because what a frame costs to compress is taken from the engine's machine.

use std::collections::VecDeque;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Version of the format.
pub const VERSION: u32 = 1;
const MAGIC: &[u8; 8] = b"KVMMUREC";
const FRAME: &[u8; 4] = b"KFRM";
/// Bytes at which a frame is closed.
const FULL: usize = 256 * 1024;
/// Frames that may wait for the thread.
const BEHIND: usize = 64;
/// How long a frame stays open.
const OPEN_FOR: Duration = Duration::from_millis(500);
/// How long [`Recording::flush`] waits for the disk.
const FLUSH_FOR: Duration = Duration::from_secs(10);
/// Names that are tried behind the first.
const NAMES: u32 = 10_000;

/// The arguments of one call.
#[derive(Debug)]
pub struct Body<'a> {
    bytes: &'a mut Vec<u8>,
    last_ids: &'a mut Vec<i64>,
}

impl Body<'_> {
    /// A number, as LEB128.
    pub fn number(&mut self, mut value: u64) -> &mut Self {
        while value >= 0x80 {
            self.bytes.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.bytes.push(value as u8);
        self
    }

    /// Yes or no.
    pub fn flag(&mut self, value: bool) -> &mut Self {
        self.number(value.into())
    }

    /// A number that may be missing: 0, or one more than it.
    pub fn optional(&mut self, value: Option<u64>) -> &mut Self {
        self.number(value.map_or(0, |value| value + 1))
    }

    /// Bytes behind their number.
    pub fn bytes(&mut self, value: &[u8]) -> &mut Self {
        let this = self.number(value.len() as u64);
        this.bytes.extend_from_slice(value);
        this
    }

    /// A float, as its eight bytes.
    pub fn float(&mut self, value: f64) -> &mut Self {
        self.bytes.extend_from_slice(&value.to_le_bytes());
        self
    }

    /// Numbers of 32 bits behind their count: all lowest bytes, then all second ones, and so on.
    /// (Tokens are small numbers: planes of equal bytes compress best and fastest.)
    pub fn words(&mut self, values: &[i32]) -> &mut Self {
        let this = self.number(values.len() as u64);
        for plane in 0..4 {
            let shift = 8 * plane;
            this.bytes
                .extend(values.iter().map(|&value| (value >> shift) as u8));
        }
        this
    }

    /// As [`Body::words`], or none: the count is one more.
    pub fn optional_words(&mut self, values: Option<&[i32]>) -> &mut Self {
        match values {
            None => self.number(0),
            Some(values) => self.number(1).words(values),
        }
    }

    /// Numbers of 64 bits behind their count.
    pub fn longs(&mut self, values: &[i64]) -> &mut Self {
        let this = self.number(values.len() as u64);
        this.bytes
            .extend(values.iter().flat_map(|value| value.to_le_bytes()));
        this
    }

    /// Sequences of a batch: 0 when they are those of the batch before, as they nearly always are;
    /// else 1 and [`Body::longs`].
    pub fn batch(&mut self, ids: &[i64]) -> &mut Self {
        if ids == self.last_ids.as_slice() && !ids.is_empty() {
            return self.number(0);
        }
        self.last_ids.clear();
        self.last_ids.extend_from_slice(ids);
        self.number(1).longs(ids)
    }
}

#[derive(Debug, Default)]
struct State {
    open: Vec<u8>,
    scratch: Vec<u8>,
    last_ids: Vec<i64>,
    /// Calls recorded so far.
    calls: u64,
    full: VecDeque<Vec<u8>>,
    spare: Vec<Vec<u8>>,
    /// Bytes that callers have closed frames of, and of those the ones that are in the file.
    closed: u64,
    written: u64,
    /// Size of the file.
    size: u64,
    flushing: bool,
    ending: bool,
    failed: Option<String>,
    told: bool,
}

#[derive(Debug)]
struct Shared {
    path: PathBuf,
    process: u32,
    state: Mutex<State>,
    /// The thread has something to do.
    work: Condvar,
    /// The thread has done something.
    done: Condvar,
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        // A caller that panicked while it appended leaves whole records before its own.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn flush(&self) {
        if self.process != std::process::id() {
            return; // a forked child: the thread is not here
        }
        let mut state = self.state();
        close(&mut state);
        state.flushing = true;
        self.work.notify_one();
        let wanted = state.closed;
        let pending = |state: &mut State| state.written < wanted && state.failed.is_none();
        drop(self.done.wait_timeout_while(state, FLUSH_FOR, pending));
    }
}

/// Closes the frame that is open.
fn close(state: &mut State) {
    if !state.open.is_empty() {
        let next = state.spare.pop().unwrap_or_default();
        let frame = std::mem::replace(&mut state.open, next);
        state.closed += frame.len() as u64;
        state.full.push_back(frame);
    }
}

/// A file that calls are recorded in. Dropping it writes what is left.
#[derive(Debug)]
pub struct Recording {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What of a recording must be written before the process ends.
#[derive(Debug, Clone)]
pub struct Unwritten(std::sync::Weak<Shared>);

impl Unwritten {
    /// Writes it. False when the recording is over.
    pub fn flush(&self) -> bool {
        let shared = self.0.upgrade();
        if let Some(shared) = &shared {
            shared.flush();
        }
        shared.is_some()
    }
}

impl Recording {
    /// Begins a file of this name, or where there is one already of the first of `NAME.1`, `NAME.2`,
    /// ... that is not there: what was recorded before a crash is not overwritten after it.
    ///
    /// `text` is JSON that says what the calls are made on.
    pub fn create(path: &Path, text: &str) -> io::Result<Self> {
        let (path, mut file) = create_new(path)?;
        let mut head = Vec::with_capacity(20 + text.len());
        head.extend_from_slice(MAGIC);
        head.extend_from_slice(&VERSION.to_le_bytes());
        head.extend_from_slice(&(text.len() as u32).to_le_bytes());
        head.extend_from_slice(&crc32fast::hash(text.as_bytes()).to_le_bytes());
        head.extend_from_slice(text.as_bytes());
        file.write_all(&head)?;
        let shared = Arc::new(Shared {
            path,
            process: std::process::id(),
            state: Mutex::new(State {
                size: head.len() as u64,
                ..State::default()
            }),
            work: Condvar::new(),
            done: Condvar::new(),
        });
        let for_thread = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("kvmmu-record".into())
            .spawn(move || write_frames(&for_thread, file))?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Records a call and returns its number, counted from 0.
    pub fn call(&self, operation: u8, encode: impl FnOnce(&mut Body<'_>)) -> u64 {
        let mut state = self.shared.state();
        let number = state.calls;
        state.calls += 1;
        self.append(state, operation, encode);
        number
    }

    /// Records what came of a call.
    pub fn outcome(&self, encode: impl FnOnce(&mut Body<'_>)) {
        self.append(self.shared.state(), 0, encode);
    }

    fn append(
        &self,
        mut state: MutexGuard<'_, State>,
        operation: u8,
        encode: impl FnOnce(&mut Body<'_>),
    ) {
        if state.failed.is_some() {
            return;
        }
        let State {
            open,
            scratch,
            last_ids,
            ..
        } = &mut *state;
        scratch.clear();
        encode(&mut Body {
            bytes: scratch,
            last_ids,
        });
        open.push(operation);
        Body {
            bytes: open,
            last_ids,
        }
        .bytes(scratch);
        if open.len() >= FULL {
            close(&mut state);
            self.shared.work.notify_one();
            let behind = |state: &mut State| state.full.len() > BEHIND && state.failed.is_none();
            drop(self.shared.done.wait_while(state, behind));
        }
    }

    /// Waits, at most ten seconds, until all calls so far are in the file.
    pub fn flush(&self) {
        self.shared.flush();
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.shared.path
    }

    /// Bytes in the file.
    pub fn size(&self) -> u64 {
        self.shared.state().size
    }

    /// Why nothing is recorded any more: once, to whoever asks first.
    pub fn new_failure(&self) -> Option<String> {
        let mut state = self.shared.state();
        if state.told || state.failed.is_none() {
            return None;
        }
        state.told = true;
        state.failed.clone()
    }

    /// Why nothing is recorded any more.
    pub fn failure(&self) -> Option<String> {
        self.shared.state().failed.clone()
    }

    /// For whoever sees the process end.
    pub fn unwritten(&self) -> Unwritten {
        Unwritten(Arc::downgrade(&self.shared))
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        if self.shared.process != std::process::id() {
            return;
        }
        self.shared.state().ending = true;
        self.shared.work.notify_one();
        if let Some(thread) = self.thread.take() {
            // A thread that panicked has said so on the error output.
            let _ = thread.join();
        }
    }
}

fn create_new(path: &Path) -> io::Result<(PathBuf, File)> {
    let mut options = OpenOptions::new();
    options.write(true).create_new(true);
    let mut name = path.to_owned();
    let mut number = 0;
    loop {
        match options.open(&name) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && number < NAMES => {
                number += 1;
                let mut next = path.as_os_str().to_owned();
                next.push(format!(".{number}"));
                name = next.into();
            }
            outcome => return outcome.map(|file| (name, file)),
        }
    }
}

/// The thread: takes frames, compresses and writes them.
fn write_frames(shared: &Shared, mut file: File) {
    loop {
        let (frame, last) = {
            let idle =
                |state: &mut State| state.full.is_empty() && !state.ending && !state.flushing;
            let state = shared.state();
            let waited = shared.work.wait_timeout_while(state, OPEN_FOR, idle);
            let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if state.full.is_empty() {
                close(&mut state);
                state.flushing = false;
            }
            (state.full.pop_front(), state.ending)
        };
        let Some(mut frame) = frame else {
            if last {
                return;
            }
            continue;
        };
        let written = write_frame(&mut file, &frame);
        let mut state = shared.state();
        state.written += frame.len() as u64;
        match written {
            Ok(bytes) => state.size += bytes,
            Err(error) => {
                state.failed = Some(error.to_string());
                state.open.clear();
                state.full.clear();
                shared.done.notify_all();
                return;
            }
        }
        frame.clear();
        if state.spare.len() < BEHIND {
            state.spare.push(frame);
        }
        shared.done.notify_all();
    }
}

fn write_frame(file: &mut File, frame: &[u8]) -> io::Result<u64> {
    let stored = lz4_flex::block::compress(frame);
    let mut bytes = Vec::with_capacity(28 + stored.len());
    bytes.extend_from_slice(FRAME);
    bytes.extend_from_slice(&(frame.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&(stored.len() as u32).to_le_bytes());
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let now = now.map_or(0, |since| since.as_micros() as u64);
    bytes.extend_from_slice(&now.to_le_bytes());
    bytes.extend_from_slice(&crc32fast::hash(&stored).to_le_bytes());
    bytes.extend_from_slice(&crc32fast::hash(&bytes).to_le_bytes());
    bytes.extend_from_slice(&stored);
    file.write_all(&bytes)?;
    Ok(bytes.len() as u64)
}

/// The records of a frame of so many raw bytes; an error says what is wrong with it.
pub fn unpack(stored: &[u8], raw: usize) -> Result<Vec<u8>, String> {
    let records = lz4_flex::block::decompress(stored, raw).map_err(|error| error.to_string())?;
    if records.len() != raw {
        return Err(format!("it has {} bytes, not {raw}", records.len()));
    }
    Ok(records)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// A folder that goes with the test.
    struct Folder(PathBuf);

    impl Folder {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("kvmmu-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Folder {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// The records of a file: what stands behind its head, frame by frame.
    fn records(path: &Path) -> Vec<u8> {
        let bytes = fs::read(path).unwrap();
        assert_eq!(&bytes[..8], MAGIC);
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
        let mut at = 20 + word(12);
        assert_eq!(crc32fast::hash(&bytes[20..at]) as usize, word(16));
        let mut found = Vec::new();
        while at < bytes.len() {
            assert_eq!(&bytes[at..at + 4], FRAME);
            assert_eq!(crc32fast::hash(&bytes[at..at + 24]) as usize, word(at + 24));
            let stored = &bytes[at + 28..at + 28 + word(at + 8)];
            assert_eq!(crc32fast::hash(stored) as usize, word(at + 20));
            found.extend(unpack(stored, word(at + 4)).unwrap());
            at += 28 + stored.len();
        }
        found
    }

    #[test]
    fn what_was_recorded_is_in_the_file() {
        let folder = Folder::new("recorded");
        let path = folder.0.join("flight");
        let recording = Recording::create(&path, "{}").unwrap();
        let number = recording.call(5, |body| {
            body.number(300)
                .optional(None)
                .words(&[1, 0x0203, -1])
                .batch(&[7, 8])
                .batch(&[7, 8]);
        });
        assert_eq!(number, 0);
        recording.flush();
        let ids = [7i64, 8].map(i64::to_le_bytes).concat();
        let words = [3, 1, 3, 255, 0, 2, 255, 0, 0, 255, 0, 0, 255].as_slice();
        let expected = [&[0xac, 2, 0][..], words, &[1, 2], &ids, &[0]].concat();
        let record = [&[5, expected.len() as u8][..], &expected].concat();
        assert_eq!(records(&path), record);
        assert_eq!(recording.size(), fs::metadata(&path).unwrap().len());
        assert_eq!(recording.call(6, |_| ()), 1);
        drop(recording);
        assert_eq!(records(&path), [&record[..], &[6, 0]].concat());
    }

    #[test]
    fn many_threads_lose_nothing_and_frames_hold_whole_records() {
        let folder = Folder::new("threads");
        let path = folder.0.join("flight");
        let recording = Recording::create(&path, "{}").unwrap();
        thread::scope(|scope| {
            for number in 0..4u8 {
                let recording = &recording;
                scope.spawn(move || {
                    for _ in 0..20_000 {
                        recording.call(number, |body| {
                            body.bytes(&[number; 100]);
                        });
                    }
                });
            }
        });
        drop(recording);
        let found = records(&path);
        let mut counts = [0; 4];
        for record in found.chunks_exact(103) {
            assert_eq!(record[1..3], [101, 100]);
            assert!(record[3..].iter().all(|&byte| byte == record[0]));
            counts[record[0] as usize] += 1;
        }
        assert_eq!(counts, [20_000; 4]);
    }

    #[test]
    fn an_earlier_recording_is_never_overwritten() {
        let folder = Folder::new("names");
        let path = folder.0.join("flight");
        let recordings: Vec<_> = (0..3)
            .map(|_| Recording::create(&path, "{}").unwrap())
            .collect();
        let names: Vec<_> = (recordings.iter())
            .map(|recording| recording.path().file_name().unwrap().to_owned())
            .collect();
        assert_eq!(names, ["flight", "flight.1", "flight.2"]);
        assert!(Recording::create(&folder.0.join("no/such"), "{}").is_err());
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_ends_the_recording_and_nothing_else() {
        let full = Path::new("/dev/full");
        let file = OpenOptions::new().write(true).open(full).unwrap();
        let shared = Arc::new(Shared {
            path: full.into(),
            process: std::process::id(),
            state: Mutex::default(),
            work: Condvar::new(),
            done: Condvar::new(),
        });
        let for_thread = Arc::clone(&shared);
        let thread = Some(thread::spawn(move || write_frames(&for_thread, file)));
        let recording = Recording { shared, thread };
        for _ in 0..100_000 {
            // 100 MB: it would wait for room.
            recording.call(1, |body| {
                body.bytes(&[0; 1000]);
            });
        }
        recording.flush();
        assert!(recording.new_failure().is_some());
        assert_eq!(recording.new_failure(), None);
        assert!(recording.failure().is_some());
    }
}
