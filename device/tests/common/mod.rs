//! Random matrices and activations, with the extremes that rounding code trips over.

use karat_device::engine::Engine;
use karat_device::pack::{CodeRow, Image, PackError};

/// SplitMix64: small, seeded, the same on every machine.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// Uniform in 0..n.
    pub fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    /// Uniform in -1..1.
    pub fn unit(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0
    }

    /// One of several kinds of row; every value is finite, also when rounded to bf16.
    pub fn row(&mut self, into: &mut [f32]) {
        let kind = self.below(10);
        // The largest value that does not round up to infinity in bf16.
        let huge = f32::from_bits(0x7F7F_7FFF);
        for x in into {
            *x = match kind {
                0 => 0.0,
                1 => f32::from_bits(self.next() as u32 & 0x807F_FFFF),
                2 => [huge, -huge, 0.0, -0.0][self.below(4)],
                3 => self.unit() * 2.0f32.powi(self.below(250) as i32 - 125),
                4 => (self.below(255) as f32) - 127.0,
                5 => self.unit() * f32::MIN_POSITIVE * 4.0,
                6 if self.below(8) > 0 => 0.0,
                _ => self.unit(),
            };
        }
    }
}

/// A random image of `out` x `inner`; 4-bit codes in every scale format, symmetric or not.
pub fn image(engine: Engine, out: usize, inner: usize, random: &mut Random) -> Image {
    let packed: Result<Image, PackError> = if engine.is_four_bit() && random.below(4) > 0 {
        let (format, zeros, mixed) = (random.below(3), random.below(2) == 0, random.below(3));
        Image::pack_codes(engine, out, inner, &mut |_, row: &mut CodeRow| {
            row.symmetric = mixed == 0 || (mixed == 1 && random.below(2) == 0);
            row.codes.fill_with(|| random.below(16) as u8);
            let mut scale = || {
                let wide =
                    if random.below(20) == 0 { 2.0f32.powi(random.below(100) as i32 - 50) } else { 0.01 };
                match format {
                    0 => half::f16::from_f32(random.unit()).to_f32(),
                    1 => half::bf16::from_f32(random.unit() * wide).to_f32(),
                    _ => random.unit() * wide,
                }
            };
            row.scale.fill_with(&mut scale);
            if !zeros {
                row.min.fill_with(&mut scale);
            }
            Ok(())
        })
    } else {
        Image::pack(engine, out, inner, &mut |_, row: &mut [f32]| {
            random.row(row);
            if engine.is_four_bit() {
                // Scales are kept in f16, whose range is narrow.
                row.iter_mut().for_each(|w| *w = w.clamp(-1000.0, 1000.0));
            }
            Ok(())
        })
    };
    packed.unwrap()
}
