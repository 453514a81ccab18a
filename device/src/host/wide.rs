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
/// same whatever the compiler makes of the loops. With `[Q, lanes]` the body is generic over a number, and `lanes` in
/// it are the [`Lanes`](crate::simd::lanes::Lanes) of the kernel.
macro_rules! wide {
    ($(#[$doc:meta])* fn $name:ident[$Q:ident, $lanes:ident]($($arg:ident: $ty:ty),* $(,)?) $body:block) => {
        $(#[$doc])*
        fn $name<const $Q: usize>(kernel: crate::simd::Kernel, $($arg: $ty),*) {
            #[inline(always)]
            fn body<L: crate::simd::lanes::Lanes, const $Q: usize>($lanes: L, $($arg: $ty),*) $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            fn avx512<const $Q: usize>($($arg: $ty),*) {
                // SAFETY: this function runs only where the machine has its instructions.
                body::<_, $Q>(unsafe { crate::simd::lanes::Avx512::assume() }, $($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            fn avx2<const $Q: usize>($($arg: $ty),*) {
                // SAFETY: as above.
                body::<_, $Q>(unsafe { crate::simd::lanes::Avx2::assume() }, $($arg),*)
            }

            assert!(kernel.is_supported(), "kernel {kernel} on a machine that lacks it");
            match kernel {
                // SAFETY: the machine has the instructions of a kernel that it supports.
                #[cfg(target_arch = "x86_64")]
                crate::simd::Kernel::Avx512 => unsafe { avx512::<$Q>($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                crate::simd::Kernel::Avx2 => unsafe { avx2::<$Q>($($arg),*) },
                _ => body::<_, $Q>(crate::simd::lanes::Portable, $($arg),*),
            }
        }
    };
    ($(#[$doc:meta])* fn $name:ident($($arg:ident: $ty:ty),* $(,)?) $body:block) => {
        $(#[$doc])*
        fn $name(kernel: crate::simd::Kernel, $($arg: $ty),*) {
            #[inline(always)]
            fn body($($arg: $ty),*) $body

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
            fn avx512($($arg: $ty),*) {
                body($($arg),*)
            }

            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2")]
            fn avx2($($arg: $ty),*) {
                body($($arg),*)
            }

            assert!(kernel.is_supported(), "kernel {kernel} on a machine that lacks it");
            match kernel {
                // SAFETY: the machine has the instructions of a kernel that it supports.
                #[cfg(target_arch = "x86_64")]
                crate::simd::Kernel::Avx512 => unsafe { avx512($($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                crate::simd::Kernel::Avx2 => unsafe { avx2($($arg),*) },
                _ => body($($arg),*),
            }
        }
    };
}
pub(crate) use wide;
