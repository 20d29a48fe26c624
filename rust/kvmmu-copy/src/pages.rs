//! Whole pages of host memory that go back to the system.
//!
//! What lives here: the check that the pages are of a kind that may go (private, writable, no file
//! behind them), and `madvise`. What never lives here: which blocks lie there.
//!
//! `MADV_DONTNEED` takes the pages away and keeps the addresses: the next access finds zeros, in
//! memory that is charged then. That holds for private anonymous memory alone. Shared memory would
//! keep its pages, a file would show its own bytes again; so each range is looked up in
//! `/proc/self/maps` before the first page goes. Between the look and the call somebody could map
//! something else there: that the memory stays what it is, the caller answers for.

use thiserror::Error;

/// Whole pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pages {
    /// Address of the first byte.
    pub address: usize,
    /// How many bytes.
    pub bytes: usize,
}

/// Why pages did not go back. Unless the system refused, none has.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum ReleaseError {
    /// A range that does not begin or end with a page, or leaves the address space.
    #[error(
        "{bytes} bytes at {address:#x} are not whole pages of {page} bytes within the address space"
    )]
    NoPages {
        /// Of the range.
        address: usize,
        /// Of the range.
        bytes: usize,
        /// Bytes of a page.
        page: usize,
    },
    /// Memory of another kind.
    #[error(
        "{bytes} bytes at {address:#x} cannot be given back: at {at:#x} is {what}; allowed is \
         private, writable memory without a file behind it"
    )]
    OtherMemory {
        /// Of the range.
        address: usize,
        /// Of the range.
        bytes: usize,
        /// First address that is something else.
        at: usize,
        /// What is there.
        what: String,
    },
    /// The system said no. Ranges before this one are gone.
    #[error(
        "{bytes} bytes at {address:#x} were not given back: {reason} (locked memory cannot be)"
    )]
    Refused {
        /// Of the range.
        address: usize,
        /// Of the range.
        bytes: usize,
        /// Error number of the system.
        errno: i32,
        /// The same in words.
        reason: String,
    },
    /// Another system than Linux.
    #[error("memory can be given back on Linux only")]
    Unsupported,
}

#[cfg(target_os = "linux")]
pub use linux::{page_bytes, release_pages};

#[cfg(target_os = "linux")]
mod linux {
    use std::{fs, io, ptr};

    use super::{Pages, ReleaseError};

    /// Bytes of the smallest page.
    #[must_use]
    pub fn page_bytes() -> usize {
        // SAFETY: `sysconf` reads a number.
        let found = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        usize::try_from(found).unwrap_or(4096)
    }

    /// Gives whole pages back to the system; they read as zeros from now on. Returns their bytes.
    ///
    /// # Errors
    /// Those of [`ReleaseError`].
    ///
    /// # Safety
    /// Nobody else touches the pages during the call or needs what they hold, no reference into them
    /// is alive, and what is mapped there does not change meanwhile.
    pub unsafe fn release_pages(ranges: &[Pages]) -> Result<u64, ReleaseError> {
        let page = page_bytes();
        for &Pages { address, bytes } in ranges {
            let inside = address
                .checked_add(bytes)
                .is_some_and(|end| end <= isize::MAX as usize);
            if address == 0
                || !inside
                || !address.is_multiple_of(page)
                || !bytes.is_multiple_of(page)
            {
                return Err(ReleaseError::NoPages {
                    address,
                    bytes,
                    page,
                });
            }
        }
        if ranges.is_empty() {
            return Ok(0);
        }
        let maps = fs::read_to_string("/proc/self/maps").map_err(|_| ReleaseError::Unsupported)?;
        check(ranges, &maps)?;
        let mut sum = 0;
        for &Pages { address, bytes } in ranges.iter().filter(|range| range.bytes > 0) {
            let start = ptr::with_exposed_provenance_mut(address);
            // SAFETY: the caller gives up what the pages hold. They are private anonymous memory
            // (`check`), so they stay mapped and read as zeros, which is valid for any byte.
            if unsafe { libc::madvise(start, bytes, libc::MADV_DONTNEED) } != 0 {
                let error = io::Error::last_os_error();
                return Err(ReleaseError::Refused {
                    address,
                    bytes,
                    errno: error.raw_os_error().unwrap_or(0),
                    reason: error.to_string(),
                });
            }
            sum += bytes as u64;
        }
        Ok(sum)
    }

    /// A line of `/proc/self/maps`.
    struct Mapping<'a> {
        start: usize,
        end: usize,
        line: &'a str,
        may_go: bool,
    }

    fn mapping(line: &str) -> Option<Mapping<'_>> {
        // start-end perms offset device inode [name]
        let mut fields = line.split_ascii_whitespace();
        let (start, end) = fields.next()?.split_once('-')?;
        let perms = fields.next()?.as_bytes();
        let inode = fields.nth(2)?;
        let name = fields.next().unwrap_or("");
        let anonymous = name.is_empty() || name == "[heap]" || name.starts_with("[anon:");
        Some(Mapping {
            start: usize::from_str_radix(start, 16).ok()?,
            end: usize::from_str_radix(end, 16).ok()?,
            line,
            may_go: perms.len() == 4
                && perms[1] == b'w'
                && perms[3] == b'p'
                && inode == "0"
                && anonymous,
        })
    }

    /// Refuses a range that is not wholly private, writable and without a file.
    pub(super) fn check(ranges: &[Pages], maps: &str) -> Result<(), ReleaseError> {
        let maps: Vec<Mapping<'_>> = maps.lines().filter_map(mapping).collect();
        for &Pages { address, bytes } in ranges {
            let (mut at, end) = (address, address + bytes);
            while at < end {
                let behind = maps.partition_point(|mapping| mapping.end <= at);
                let found = maps.get(behind).filter(|mapping| mapping.start <= at);
                match found {
                    Some(mapping) if mapping.may_go => at = mapping.end,
                    other => {
                        return Err(ReleaseError::OtherMemory {
                            address,
                            bytes,
                            at,
                            what: other.map_or("nothing".into(), |mapping| mapping.line.into()),
                        });
                    }
                }
            }
        }
        Ok(())
    }
}

#[cfg(not(target_os = "linux"))]
pub use elsewhere::{page_bytes, release_pages};

#[cfg(not(target_os = "linux"))]
mod elsewhere {
    use super::{Pages, ReleaseError};

    /// Bytes of the smallest page, as most systems have it.
    #[must_use]
    pub fn page_bytes() -> usize {
        4096
    }

    /// Refuses.
    ///
    /// # Errors
    /// [`ReleaseError::Unsupported`].
    ///
    /// # Safety
    /// None needed; the signature is that of Linux.
    pub unsafe fn release_pages(_: &[Pages]) -> Result<u64, ReleaseError> {
        Err(ReleaseError::Unsupported)
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::linux::check;
    use super::*;

    /// Private anonymous memory of so many pages, unmapped when dropped.
    struct Mapped {
        address: usize,
        bytes: usize,
    }

    impl Mapped {
        fn new(pages: usize, kind: i32) -> Self {
            let bytes = pages * page_bytes();
            let rights = libc::PROT_READ | libc::PROT_WRITE;
            let kind = kind | libc::MAP_ANONYMOUS;
            // SAFETY: a fresh mapping at an address that the system chooses.
            let start = unsafe { libc::mmap(std::ptr::null_mut(), bytes, rights, kind, -1, 0) };
            assert_ne!(start, libc::MAP_FAILED);
            let address = start.expose_provenance();
            Self { address, bytes }
        }

        fn bytes(&mut self) -> &mut [u8] {
            let start = std::ptr::with_exposed_provenance_mut(self.address);
            // SAFETY: the mapping is this object's, readable and writable.
            unsafe { std::slice::from_raw_parts_mut(start, self.bytes) }
        }

        /// Pages of it that are in memory.
        fn resident(&self) -> usize {
            let mut found = vec![0; self.bytes / page_bytes()];
            let start = std::ptr::with_exposed_provenance_mut(self.address);
            // SAFETY: the vector has a byte a page.
            let done = unsafe { libc::mincore(start, self.bytes, found.as_mut_ptr()) };
            assert_eq!(done, 0);
            found.iter().filter(|&&page| page & 1 == 1).count()
        }
    }

    impl Drop for Mapped {
        fn drop(&mut self) {
            let start = std::ptr::with_exposed_provenance_mut(self.address);
            // SAFETY: nothing refers to it any more.
            unsafe { libc::munmap(start, self.bytes) };
        }
    }

    fn release(ranges: &[Pages]) -> Result<u64, ReleaseError> {
        // SAFETY: the tests below give ranges of memory of their own that nobody else uses.
        unsafe { release_pages(ranges) }
    }

    #[test]
    fn pages_go_and_read_as_zeros_and_those_beside_them_stay() {
        let page = page_bytes();
        let mut mapped = Mapped::new(16, libc::MAP_PRIVATE);
        mapped.bytes().fill(7);
        assert_eq!(mapped.resident(), 16);
        let gone = Pages {
            address: mapped.address + 4 * page,
            bytes: 8 * page,
        };
        assert_eq!(release(&[gone]), Ok(8 * page as u64));
        assert_eq!(mapped.resident(), 8);
        for (index, bytes) in mapped.bytes().chunks(page).enumerate() {
            let expected = if (4..12).contains(&index) { 0 } else { 7 };
            assert!(bytes.iter().all(|&byte| byte == expected), "page {index}");
        }
        mapped.bytes().fill(9);
        assert_eq!(mapped.resident(), 16);
    }

    #[test]
    fn shared_memory_is_refused_and_nothing_has_gone() {
        let page = page_bytes();
        let mut private = Mapped::new(2, libc::MAP_PRIVATE);
        let mut shared = Mapped::new(2, libc::MAP_SHARED);
        private.bytes().fill(7);
        shared.bytes().fill(8);
        let all = |mapped: &Mapped| Pages {
            address: mapped.address,
            bytes: 2 * page,
        };
        let refused = release(&[all(&private), all(&shared)]);
        let at_shared = shared.address;
        assert!(
            matches!(refused, Err(ReleaseError::OtherMemory { at, .. }) if at == at_shared),
            "{refused:?}"
        );
        assert!(private.bytes().iter().all(|&byte| byte == 7));
        assert!(shared.bytes().iter().all(|&byte| byte == 8));
    }

    #[test]
    fn locked_memory_is_refused_with_the_number_of_the_error() {
        let mut mapped = Mapped::new(1, libc::MAP_PRIVATE);
        mapped.bytes().fill(7);
        let start = std::ptr::with_exposed_provenance(mapped.address);
        // SAFETY: it changes nothing that is there.
        if unsafe { libc::mlock(start, mapped.bytes) } != 0 {
            return; // no right to lock: then nobody has locked anything
        }
        let pages = Pages {
            address: mapped.address,
            bytes: mapped.bytes,
        };
        let refused = release(&[pages]);
        assert!(
            matches!(refused, Err(ReleaseError::Refused { errno, .. }) if errno == libc::EINVAL),
            "{refused:?}"
        );
        assert!(mapped.bytes().iter().all(|&byte| byte == 7));
    }

    #[test]
    fn what_is_no_whole_page_is_refused() {
        let page = page_bytes();
        let mapped = Mapped::new(2, libc::MAP_PRIVATE);
        for (address, bytes) in [
            (mapped.address + 1, page),
            (mapped.address, page - 1),
            (0, page),
            (usize::MAX - page + 1, page),
        ] {
            assert_eq!(
                release(&[Pages { address, bytes }]),
                Err(ReleaseError::NoPages {
                    address,
                    bytes,
                    page
                })
            );
        }
        assert_eq!(release(&[]), Ok(0));
    }

    #[test]
    fn files_gaps_and_what_may_not_be_written_are_told_apart() {
        let maps = "\
10000-20000 rw-p 00000000 00:00 0 \n\
20000-30000 rw-p 00000000 00:00 0                          [heap]\n\
30000-40000 rw-p 00000000 08:01 77                         /data/weights\n\
50000-60000 r--p 00000000 00:00 0 \n\
60000-70000 rw-s 00000000 00:01 9                          /dev/zero (deleted)\n\
70000-80000 rw-p 00000000 00:00 0                          [stack]\n";
        let pages = |address, bytes| [Pages { address, bytes }];
        assert_eq!(check(&pages(0x10000, 0x20000), maps), Ok(()));
        for (address, bytes, wrong) in [
            (0x20000, 0x11000, 0x30000),
            (0x3f000, 0x1000, 0x3f000),
            (0x40000, 0x1000, 0x40000),
            (0x50000, 0x1000, 0x50000),
            (0x60000, 0x1000, 0x60000),
            (0x70000, 0x1000, 0x70000),
            (0x90000, 0x1000, 0x90000),
        ] {
            let refused = check(&pages(address, bytes), maps);
            assert!(
                matches!(refused, Err(ReleaseError::OtherMemory { at, .. }) if at == wrong),
                "{address:#x}: {refused:?}"
            );
        }
    }
}
