//! What the arithmetic units of this machine give when nothing but registers is involved.

use super::Kernel;
#[cfg(target_arch = "x86_64")]
use std::arch::x86_64::*;
use std::hint::black_box;

/// Sums that run side by side, so that no unit waits for the result of the one before.
const CHAINS: usize = 12;

/// Multiplies and adds in f32, fused where the machine can; the number of operations done.
///
/// The widest registers are not used: on machines whose 512-bit units are two of 256 bits they give no more.
pub fn fma(rounds: usize) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if Kernel::Avx2.is_supported() && is_x86_feature_detected!("fma") {
        // SAFETY: just checked.
        unsafe { fma_256(rounds) };
        return (rounds * CHAINS * 8 * 2) as u64;
    }
    let (a, b) = (black_box(0.999f32), black_box(0.001f32));
    let mut sums = [[0f32; 4]; CHAINS];
    for _ in 0..rounds {
        sums.iter_mut().flatten().for_each(|sum| *sum = *sum * a + b);
    }
    black_box(sums);
    (rounds * CHAINS * 4 * 2) as u64
}

/// Multiplies int8 by int8 and adds to i32; the number of operations done. `kernel` must be supported.
pub fn dot(kernel: Kernel, rounds: usize) -> u64 {
    assert!(kernel.is_supported(), "dot: kernel {kernel} on a machine without it");
    #[cfg(target_arch = "x86_64")]
    match kernel {
        Kernel::Avx512 => {
            // SAFETY: just checked.
            unsafe { dot_512(rounds) };
            return (rounds * CHAINS * 64 * 2) as u64;
        }
        Kernel::Avx2 => {
            // SAFETY: just checked.
            unsafe { dot_256(rounds) };
            return (rounds * CHAINS * 32 * 2) as u64;
        }
        Kernel::Portable => {}
    }
    let (a, b) = (black_box([3i8; 16]), black_box([5i8; 16]));
    let mut sums = [[0i32; 16]; CHAINS];
    for _ in 0..rounds {
        for sum in &mut sums {
            for i in 0..16 {
                sum[i] = sum[i].wrapping_add(i32::from(a[i]) * i32::from(b[i]));
            }
        }
    }
    black_box(sums);
    (rounds * CHAINS * 16 * 2) as u64
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn fma_256(rounds: usize) {
    let (a, b) = (_mm256_set1_ps(black_box(0.999)), _mm256_set1_ps(black_box(0.001)));
    let mut sums = [_mm256_setzero_ps(); CHAINS];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm256_fmadd_ps(*sum, a, b);
        }
    }
    black_box(sums);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni")]
fn dot_512(rounds: usize) {
    let (a, b) = (_mm512_set1_epi8(black_box(3)), _mm512_set1_epi8(black_box(5)));
    let mut sums = [_mm512_setzero_si512(); CHAINS];
    for _ in 0..rounds {
        for sum in &mut sums {
            *sum = _mm512_dpbusd_epi32(*sum, a, b);
        }
    }
    black_box(sums);
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn dot_256(rounds: usize) {
    let (a, b) = (_mm256_set1_epi8(black_box(3)), _mm256_set1_epi8(black_box(5)));
    let ones = _mm256_set1_epi16(1);
    let mut sums = [_mm256_setzero_si256(); CHAINS];
    for _ in 0..rounds {
        for sum in &mut sums {
            // The pair that is added depends on the sum, so that the product is not taken out of the loop.
            let pairs = _mm256_maddubs_epi16(_mm256_xor_si256(a, *sum), b);
            *sum = _mm256_add_epi32(*sum, _mm256_madd_epi16(pairs, ones));
        }
    }
    black_box(sums);
}

#[cfg(test)]
mod tests {
    use super::*;

    // Twelve chains of eight or four values, a product and a sum each; int8 four times as many or more.
    #[test]
    fn operations_grow_with_the_rounds() {
        assert!(fma(10) >= 10 * 12 * 4 * 2);
        assert_eq!(fma(20), 2 * fma(10));
        for kernel in Kernel::ALL.into_iter().filter(|k| k.is_supported()) {
            assert_eq!(dot(kernel, 20), 2 * dot(kernel, 10));
            assert!(dot(kernel, 10) >= 10 * 12 * 16 * 2);
        }
    }
}
