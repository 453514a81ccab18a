//! Kernels: which instructions a launch uses, chosen when the program runs.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod ceiling;
pub(crate) mod lanes;

use std::fmt;
use std::ops::Range;
use std::str::FromStr;

use crate::engine::Activations;
use crate::engine::{LaunchError, bfp16, int8, strict, w4a8, w4a16};
use crate::pack::{Image, Storage};

/// The instructions that launches are compiled for. All kernels give the same bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kernel {
    /// Plain Rust for any machine: the definition of every engine.
    Portable,
    /// x86-64 with AVX2 and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL and VNNI.
    Avx512,
}

/// A kernel that this machine cannot run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("this machine lacks the instructions of kernel {kernel}; it runs {best}", best = Kernel::best())]
pub struct UnsupportedKernel {
    /// The kernel that was asked for.
    pub kernel: Kernel,
}

/// Why the kernel that the environment asks for cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KernelError {
    /// The variable names no kernel.
    #[error("KARAT_KERNEL is {0:?}; it takes portable, avx2 or avx512")]
    Unknown(String),
    /// The machine lacks the instructions.
    #[error("KARAT_KERNEL: {0}")]
    Unsupported(#[from] UnsupportedKernel),
}

impl Kernel {
    /// Every kernel, the portable one first.
    pub const ALL: [Kernel; 3] = [Kernel::Portable, Kernel::Avx2, Kernel::Avx512];

    /// The name of the kernel in `KARAT_KERNEL` and in reports.
    pub fn name(self) -> &'static str {
        match self {
            Kernel::Portable => "portable",
            Kernel::Avx2 => "avx2",
            Kernel::Avx512 => "avx512",
        }
    }

    /// Whether this machine has the instructions.
    pub fn is_supported(self) -> bool {
        match self {
            Kernel::Portable => true,
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx2 => avx2::is_supported(),
            #[cfg(target_arch = "x86_64")]
            Kernel::Avx512 => avx512::is_supported(),
            #[cfg(not(target_arch = "x86_64"))]
            _ => false,
        }
    }

    /// The widest kernel that this machine supports.
    pub fn best() -> Kernel {
        Kernel::ALL.into_iter().rfind(|k| k.is_supported()).unwrap_or(Kernel::Portable)
    }

    /// The kernel that the environment variable `KARAT_KERNEL` names, or the best one where it is not set.
    pub fn chosen() -> Result<Kernel, KernelError> {
        let Ok(name) = std::env::var("KARAT_KERNEL") else { return Ok(Kernel::best()) };
        let kernel: Kernel = name.parse()?;
        if kernel.is_supported() { Ok(kernel) } else { Err(UnsupportedKernel { kernel }.into()) }
    }
}

impl fmt::Display for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Kernel {
    type Err = KernelError;

    fn from_str(name: &str) -> Result<Kernel, KernelError> {
        let found = Kernel::ALL.into_iter().find(|k| k.name() == name);
        found.ok_or_else(|| KernelError::Unknown(name.to_string()))
    }
}

/// Asks for the cache line `distance` bytes behind the start of `of`, which may lie behind the end of the memory that it
/// belongs to; nothing happens where there is none.
#[inline(always)]
pub(crate) fn prefetch<T: ?Sized>(of: &T, distance: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        let address = std::ptr::from_ref(of).cast::<i8>().wrapping_add(distance);
        // SAFETY: every x86-64 has the instruction, and it may be given any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (of, distance);
}

/// Brings `rows` activation rows into the format of the image's engine.
///
/// One source for every kernel; the compiler turns it into the instructions of each.
pub(crate) fn prepare(
    kernel: Kernel,
    image: &Image,
    x: &[f32],
    rows: usize,
    into: &mut Activations,
) -> Result<(), LaunchError> {
    match kernel {
        // SAFETY: a `Scratch` only holds kernels that this machine supports.
        #[cfg(target_arch = "x86_64")]
        Kernel::Avx512 => unsafe { avx512::prepare(image, x, rows, into) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Kernel::Avx2 => unsafe { avx2::prepare(image, x, rows, into) },
        _ => prepare_portable(image, x, rows, into),
    }
}

#[inline(always)]
fn prepare_portable(
    image: &Image,
    x: &[f32],
    rows: usize,
    into: &mut Activations,
) -> Result<(), LaunchError> {
    match &image.storage {
        Storage::Strict(_) => strict::prepare(image.inner(), x, rows, into),
        Storage::Int8(_) => int8::prepare(image.inner(), x, rows, into),
        Storage::W4A8(_) => w4a8::prepare(image.inner(), x, rows, into),
        Storage::W4A16(_) => w4a16::prepare(image.inner(), x, rows, into),
        Storage::Bfp16(_) => bfp16::prepare(image.inner(), x, rows, into),
    }
}

/// Computes the outputs of `tiles` for all prepared rows into `y`, `[tile, row, outputs of a tile]`.
///
/// `y` comes zeroed.
pub(crate) fn run(
    kernel: Kernel,
    image: &Image,
    x: &[f32],
    a: &Activations,
    tiles: Range<usize>,
    y: &mut [f32],
) {
    match kernel {
        // SAFETY: a `Scratch` only holds kernels that this machine supports.
        #[cfg(target_arch = "x86_64")]
        Kernel::Avx512 => unsafe { avx512::run(image, x, a, tiles, y) },
        // SAFETY: as above.
        #[cfg(target_arch = "x86_64")]
        Kernel::Avx2 => unsafe { avx2::run(image, x, a, tiles, y) },
        _ => match &image.storage {
            Storage::Strict(image) => strict::portable(image, x, tiles, y),
            Storage::Int8(image) => int8::portable(image, a, tiles, y),
            Storage::W4A8(image) => w4a8::portable(image, a, tiles, y),
            Storage::W4A16(image) => w4a16::portable(image, a, tiles, y),
            Storage::Bfp16(image) => bfp16::portable(image, a, tiles, y),
        },
    }
}

/// The wrapping sum of all words of `lines`: nothing but a walk over the memory.
pub(crate) fn probe(lines: &[[u64; 8]]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if Kernel::Avx512.is_supported() {
        // SAFETY: just checked.
        return unsafe { avx512::probe(lines) };
    }
    // Four quarters are walked side by side: a core fetches more lines from several streams.
    let (quarters, rest) = lines.split_at(lines.len() / 4 * 4);
    let mut sums = [[0u64; 8]; 4];
    let add = |sum: &mut [u64; 8], line: &[u64; 8]| {
        for i in 0..8 {
            sum[i] = sum[i].wrapping_add(line[i]);
        }
    };
    let (front, back) = quarters.split_at(quarters.len() / 2);
    let ((a, b), (c, d)) = (front.split_at(front.len() / 2), back.split_at(back.len() / 2));
    for (((a, b), c), d) in a.iter().zip(b).zip(c).zip(d) {
        for (sum, line) in sums.iter_mut().zip([a, b, c, d]) {
            add(sum, line);
        }
    }
    rest.iter().for_each(|line| add(&mut sums[0], line));
    sums.as_flattened().iter().fold(0, |total, &sum| total.wrapping_add(sum))
}

/// The R values from `at` on: one block of R rows that stand together.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn rows<const R: usize, T>(values: &[T], at: usize) -> &[T; R] {
    values[at..at + R].first_chunk().expect("the slice was cut to R values")
}
