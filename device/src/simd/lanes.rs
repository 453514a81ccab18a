//! Sixteen f32 side by side, in the registers of a kernel.
//!
//! For loops that the compiler does not turn into vector code by itself: it gives up on sums that are kept for
//! several rows and several columns at once, and then runs ten times slower.

/// Operations on sixteen values. A value of the type is the proof that the machine has the instructions.
pub(crate) trait Lanes: Copy {
    /// Sixteen f32.
    type V: Copy;

    fn splat(self, value: f32) -> Self::V;

    fn load(self, values: &[f32; 16]) -> Self::V;

    fn store(self, v: Self::V, into: &mut [f32; 16]);

    /// `sum + a · b` lane by lane, each operation rounded.
    fn add_product(self, sum: Self::V, a: Self::V, b: Self::V) -> Self::V;
}

/// Any machine.
#[derive(Clone, Copy)]
pub(crate) struct Portable;

impl Lanes for Portable {
    type V = [f32; 16];

    #[inline(always)]
    fn splat(self, value: f32) -> [f32; 16] {
        [value; 16]
    }

    #[inline(always)]
    fn load(self, values: &[f32; 16]) -> [f32; 16] {
        *values
    }

    #[inline(always)]
    fn store(self, v: [f32; 16], into: &mut [f32; 16]) {
        *into = v;
    }

    #[inline(always)]
    fn add_product(self, mut sum: [f32; 16], a: [f32; 16], b: [f32; 16]) -> [f32; 16] {
        for l in 0..16 {
            sum[l] += a[l] * b[l];
        }
        sum
    }
}

#[cfg(target_arch = "x86_64")]
pub(crate) use x86::{Avx2, Avx512};

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Lanes;
    use std::arch::x86_64::*;

    /// A machine with AVX2.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx2(());

    impl Avx2 {
        /// # Safety
        /// The machine has AVX2.
        #[inline(always)]
        pub unsafe fn assume() -> Avx2 {
            Avx2(())
        }
    }

    impl Lanes for Avx2 {
        type V = [__m256; 2];

        #[inline(always)]
        fn splat(self, value: f32) -> [__m256; 2] {
            // SAFETY: a value of this type exists only where the machine has AVX2.
            unsafe { [_mm256_set1_ps(value); 2] }
        }

        #[inline(always)]
        fn load(self, values: &[f32; 16]) -> [__m256; 2] {
            // SAFETY: as above; the reference covers both halves of 32 bytes, and no alignment is needed.
            unsafe { [_mm256_loadu_ps(values.as_ptr()), _mm256_loadu_ps(values.as_ptr().add(8))] }
        }

        #[inline(always)]
        fn store(self, v: [__m256; 2], into: &mut [f32; 16]) {
            // SAFETY: as above, for writing.
            unsafe {
                _mm256_storeu_ps(into.as_mut_ptr(), v[0]);
                _mm256_storeu_ps(into.as_mut_ptr().add(8), v[1]);
            }
        }

        #[inline(always)]
        fn add_product(self, sum: [__m256; 2], a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
            // SAFETY: a value of this type exists only where the machine has AVX2.
            unsafe {
                [
                    _mm256_add_ps(sum[0], _mm256_mul_ps(a[0], b[0])),
                    _mm256_add_ps(sum[1], _mm256_mul_ps(a[1], b[1])),
                ]
            }
        }
    }

    /// A machine with AVX-512 F.
    #[derive(Clone, Copy)]
    pub(crate) struct Avx512(());

    impl Avx512 {
        /// # Safety
        /// The machine has AVX-512 F.
        #[inline(always)]
        pub unsafe fn assume() -> Avx512 {
            Avx512(())
        }
    }

    impl Lanes for Avx512 {
        type V = __m512;

        #[inline(always)]
        fn splat(self, value: f32) -> __m512 {
            // SAFETY: a value of this type exists only where the machine has AVX-512 F.
            unsafe { _mm512_set1_ps(value) }
        }

        #[inline(always)]
        fn load(self, values: &[f32; 16]) -> __m512 {
            // SAFETY: as above; the reference covers the 64 bytes, and no alignment is needed.
            unsafe { _mm512_loadu_ps(values.as_ptr()) }
        }

        #[inline(always)]
        fn store(self, v: __m512, into: &mut [f32; 16]) {
            // SAFETY: as above, for writing.
            unsafe { _mm512_storeu_ps(into.as_mut_ptr(), v) }
        }

        #[inline(always)]
        fn add_product(self, sum: __m512, a: __m512, b: __m512) -> __m512 {
            // SAFETY: a value of this type exists only where the machine has AVX-512 F.
            unsafe { _mm512_add_ps(sum, _mm512_mul_ps(a, b)) }
        }
    }
}
