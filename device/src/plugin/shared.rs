//! Memory that both processes see: values pass through it, and only their places through the pipe.

use memmap2::MmapMut;
use std::fs::{File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// The least that is mapped, so that small calls never map anew.
const LEAST: usize = 1 << 20;

/// Values begin at multiples of this: a cache line.
const ALIGN: usize = 64;

/// A file in memory, mapped by the two processes. One writes while the other waits: a request and its reply
/// take turns in it, each from its start.
pub(super) struct Shared {
    file: File,
    map: Option<MmapMut>,
    used: usize,
}

impl Shared {
    /// A new file, and its path for the other side. The caller removes it once the other side has it open.
    pub fn create() -> io::Result<(Shared, PathBuf)> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let in_memory = Path::new("/dev/shm");
        let dir = if in_memory.is_dir() { in_memory.to_path_buf() } else { std::env::temp_dir() };
        let n = COUNT.fetch_add(1, Ordering::Relaxed);
        let path = dir.join(format!("karat-{}-{n}", std::process::id()));
        let mut options = OpenOptions::new();
        options.read(true).write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let file = options.open(&path)?;
        Ok((Shared { file, map: None, used: 0 }, path))
    }

    /// The file of the other side.
    pub fn open(path: &Path) -> io::Result<Shared> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        Ok(Shared { file, map: None, used: 0 })
    }

    /// Begins a request or a reply.
    pub fn begin(&mut self) {
        self.used = 0;
    }

    /// Writes bytes behind those before them; their place, or nothing where there is no room for them.
    pub fn put(&mut self, bytes: &[u8]) -> Option<u64> {
        let at = self.room(bytes.len())?;
        let start = at as usize;
        self.map.as_mut()?.get_mut(start..start + bytes.len())?.copy_from_slice(bytes);
        Some(at)
    }

    /// Room for so many bytes behind those before them, whatever they hold now.
    pub fn room(&mut self, length: usize) -> Option<u64> {
        let at = self.used.next_multiple_of(ALIGN);
        let end = at.checked_add(length)?;
        if self.map.as_ref().is_none_or(|map| map.len() < end) {
            let size = end.checked_next_power_of_two()?.max(LEAST);
            reserve(&self.file, size)?;
            self.remap()?;
        }
        self.used = end;
        Some(at as u64)
    }

    /// The bytes at a place; nothing where the file does not reach so far.
    pub fn get(&mut self, at: u64, length: usize) -> Option<&[u8]> {
        let at = usize::try_from(at).ok()?;
        let end = at.checked_add(length)?;
        if self.map.as_ref().is_none_or(|map| map.len() < end) {
            self.remap()?;
        }
        self.map.as_ref()?.get(at..end)
    }

    /// What lies before a place, to be read, and so many bytes from there on, to be written.
    pub fn split(&mut self, at: u64, length: usize) -> Option<(&[u8], &mut [u8])> {
        self.get(at, length)?;
        let (before, behind) = self.map.as_mut()?.split_at_mut_checked(usize::try_from(at).ok()?)?;
        Some((before, behind.get_mut(..length)?))
    }

    #[allow(unsafe_code)]
    fn remap(&mut self) -> Option<()> {
        self.map = None;
        // SAFETY: only the two processes of a plug-in have the file, they take turns in it, and neither
        // shortens it. Whatever a wild library writes there is read as numbers, of which any bits are some.
        self.map = Some(unsafe { MmapMut::map_mut(&self.file) }.ok()?);
        Some(())
    }
}

/// Makes a file so long and takes the memory for it now, so that a full file system is an answer and no fault.
#[cfg(target_os = "linux")]
#[allow(unsafe_code)]
fn reserve(file: &File, size: usize) -> Option<()> {
    use std::os::fd::AsRawFd;
    let size = libc::off_t::try_from(size).ok()?;
    // SAFETY: the descriptor is that of an open file.
    (unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, size) } == 0).then_some(())
}

#[cfg(not(target_os = "linux"))]
fn reserve(file: &File, size: usize) -> Option<()> {
    file.set_len(size as u64).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    // The other side maps again when the file has grown; beyond its end there is nothing.
    #[test]
    fn what_one_side_puts_the_other_gets() {
        let (mut ours, path) = Shared::create().unwrap();
        let mut theirs = Shared::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert_eq!((ours.put(b"one"), ours.put(b"three")), (Some(0), Some(64)));
        assert_eq!(theirs.get(64, 5), Some(&b"three"[..]));
        let long = vec![7; LEAST + 1];
        assert_eq!(ours.put(&long), Some(128));
        assert_eq!(theirs.get(128, LEAST + 1), Some(&long[..]));
        assert_eq!(theirs.get(0, 1 << 30), None);
        assert_eq!(theirs.get(u64::MAX, 8), None);
        let (before, room) = theirs.split(64, 5).unwrap();
        assert_eq!((&before[..3], &*room), (&b"one"[..], &b"three"[..]));
        room.copy_from_slice(b"THREE");
        assert_eq!(ours.get(64, 5), Some(&b"THREE"[..]));
        assert!(theirs.split(64, 1 << 30).is_none());
        theirs.begin();
        assert_eq!(theirs.put(b"two"), Some(0));
        assert_eq!(ours.get(0, 3), Some(&b"two"[..]));
    }
}
