//! Memory for weight images: cache-line aligned, zeroed, and advised to huge pages.

use bytemuck::{Pod, Zeroable};

/// One cache line, so that a vector load of 64 bytes at a multiple of 64 never crosses two.
#[derive(Clone, Copy, Pod, Zeroable)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// A zeroed run of bytes at a multiple of 64.
///
/// The pages are advised to be huge before they are touched: a decode step walks the whole image once, and
/// with pages of 4 KiB one thread reads a third less per second.
pub(crate) struct Buffer {
    lines: Vec<Line>,
    bytes: usize,
}

impl Buffer {
    /// `bytes` zero bytes.
    pub fn zeroed(bytes: usize) -> Buffer {
        let count = bytes.div_ceil(64);
        let mut lines: Vec<Line> = Vec::with_capacity(count);
        advise_huge(lines.as_mut_ptr().cast(), lines.capacity() * 64);
        lines.resize(count, Line([0; 64]));
        Buffer { lines, bytes }
    }

    /// How many bytes were asked for.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// The wrapping sum of all lines, eight bytes at a time: nothing but a walk over the memory.
    pub fn probe(&self) -> u64 {
        crate::simd::probe(bytemuck::cast_slice(&self.lines))
    }

    /// The bytes as values of `T`; the length is a multiple of the size of `T`.
    pub fn as_slice<T: Pod>(&self) -> &[T] {
        bytemuck::cast_slice(&bytemuck::cast_slice::<Line, u8>(&self.lines)[..self.bytes])
    }

    /// The bytes as values of `T`, to be written.
    pub fn as_mut_slice<T: Pod>(&mut self) -> &mut [T] {
        bytemuck::cast_slice_mut(&mut bytemuck::cast_slice_mut::<Line, u8>(&mut self.lines)[..self.bytes])
    }
}

/// Asks the kernel to back the whole pages in `start .. start + bytes` with huge pages.
///
/// The advice changes nothing but speed, so its refusal is not an error.
#[cfg(target_os = "linux")]
fn advise_huge(start: *mut u8, bytes: usize) {
    const PAGE: usize = 4096;
    const HUGE: usize = 2 << 20;
    if bytes < HUGE {
        return;
    }
    let first = start.addr().next_multiple_of(PAGE) - start.addr();
    let length = (bytes - first) / PAGE * PAGE;
    // SAFETY: the range lies inside one allocation owned by the caller, and MADV_HUGEPAGE never changes
    // the contents of memory.
    unsafe { libc::madvise(start.add(first).cast(), length, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn advise_huge(_start: *mut u8, _bytes: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_on_a_line_and_holds_zeros() {
        for bytes in [0, 4, 64, 100, 5 << 20] {
            let buffer = Buffer::zeroed(bytes);
            assert_eq!(buffer.as_slice::<u8>().as_ptr().addr() % 64, 0);
            assert_eq!(buffer.as_slice::<u8>().len(), bytes);
            assert!(buffer.as_slice::<u8>().iter().all(|&b| b == 0));
        }
    }
}
