//! Compiling a host kernel several times, for the registers that a machine may have.

use crate::simd::Kernel;
use std::sync::OnceLock;

/// The kernel that the host side uses: the environment's choice, else the widest.
pub(crate) fn kernel() -> Kernel {
    static CHOSEN: OnceLock<Kernel> = OnceLock::new();
    *CHOSEN.get_or_init(|| Kernel::chosen().unwrap_or(Kernel::best()))
}

/// Defines `$name(kernel, …)`: the body, compiled for each kernel.
///
/// The bodies hold no fused operation and split sums by lanes of their own, so that the bits are the
/// same whatever the compiler makes of the loops.
macro_rules! wide {
    ($(#[$doc:meta])* fn $name:ident$([$Q:ident])?($($arg:ident: $ty:ty),* $(,)?) $body:block) => {
        $(#[$doc])*
        fn $name$(<const $Q: usize>)?(kernel: crate::simd::Kernel, $($arg: $ty),*) {
            #[inline(always)]
            fn body$(<const $Q: usize>)?($($arg: $ty),*) $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            fn avx512$(<const $Q: usize>)?($($arg: $ty),*) {
                body$(::<$Q>)?($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            fn avx2$(<const $Q: usize>)?($($arg: $ty),*) {
                body$(::<$Q>)?($($arg),*)
            }

            assert!(kernel.is_supported(), "kernel {kernel} on a machine that lacks it");
            match kernel {
                // SAFETY: the machine has the instructions of a kernel that it supports.
                #[cfg(target_arch = "x86_64")]
                crate::simd::Kernel::Avx512 => unsafe { avx512$(::<$Q>)?($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                crate::simd::Kernel::Avx2 => unsafe { avx2$(::<$Q>)?($($arg),*) },
                _ => body$(::<$Q>)?($($arg),*),
            }
        }
    };
}
pub(crate) use wide;
