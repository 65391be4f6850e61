//! Products of 8-bit integers: weights scaled output by output, rows when they come, [`ROUND`] inputs of a row at a time.
//!
//! Both are rotated first: `W x = (W H)(H x)` for an orthogonal H, here a Hadamard matrix on every 64 inputs. Hidden states have a few numbers so much
//! larger than all others that these would be left with few of the 255 steps; rotated, they are spread over 64 numbers (as in QuaRot, Ashkboos et al., 2024).
//! Sums are exact integers within a round, so that every way below, and the tile unit, gives the same bits.
#![allow(unsafe_code)]

use std::sync::OnceLock;

use rayon::prelude::*;

use super::Row;
use super::kernels::{BLOCK, Isa, PANEL, Rows, SPREAD, Store, quantise};
use super::memory::Block;

/// Inputs whose products are summed as integers and that have a scale of their own in each row.
pub(super) const ROUND: usize = 24 * SPREAD;

/// The Hadamard matrix goes without its factor of 1/8 into rows and into weights.
pub(super) const ROTATIONS: f32 = 1.0 / SPREAD as f32;

/// How products are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// By the dot products of AVX-512 VNNI.
    #[cfg(target_arch = "x86_64")]
    Dot,
    /// By those of pairs that AVX2 has.
    #[cfg(target_arch = "x86_64")]
    Avx2,
    /// One by one.
    Portable,
}

impl Way {
    /// Every way this processor can go.
    pub(super) fn available() -> Vec<Self> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if Isa::best() == Isa::Avx512 && is_x86_feature_detected!("avx512vnni") {
                all.push(Self::Dot);
            }
            if is_x86_feature_detected!("avx2") {
                all.push(Self::Avx2);
            }
        }
        all.push(Self::Portable);
        all
    }

    /// The fastest of [`Self::available`].
    pub(super) fn best() -> Self {
        static BEST: OnceLock<Way> = OnceLock::new();
        *BEST.get_or_init(|| Self::available()[0])
    }

    /// What four integers of a row are combined with: dot products take rows unsigned, their numbers and 128.
    fn flip(self) -> u32 {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Dot => 0x8080_8080,
            _ => 0,
        }
    }
}

/// Weights in panels of [`PANEL`] columns: for each four inputs, four integers of each column.
#[derive(Debug)]
pub(super) struct Weights {
    words: Block<u32>,
    /// For each panel, round and column, 128 times the sum of the integers, negative: dot products take rows that are 128 too large.
    offsets: Vec<i32>,
    /// What an integer of each column is worth.
    scales: Vec<f32>,
    k: usize,
    n: usize,
}

impl Weights {
    /// Packs rows of `k` weights, `n` of them.
    pub(super) fn pack(k: usize, n: usize, row: Row<'_>) -> Self {
        let (width, columns) = (k.next_multiple_of(SPREAD), n.next_multiple_of(PANEL));
        let rounds = width.div_ceil(ROUND);
        let mut words = Block::beside_others(columns * width / 4);
        let mut offsets = vec![0; rounds * columns];
        let mut scales = vec![0.0; columns];
        let panels = words.par_chunks_mut(PANEL * width / 4).zip(offsets.par_chunks_mut(rounds * PANEL)).zip(scales.par_chunks_mut(PANEL));
        panels.enumerate().for_each_init(
            || (vec![0.0; k], vec![0.0; width], vec![0; width]),
            |(floats, rotated, integers), (p, ((panel, offsets), scales))| {
                for within in (0..PANEL).filter(|within| p * PANEL + within < n) {
                    row(p * PANEL + within, floats);
                    scales[within] = quantise(Isa::best(), floats, rotated, integers, SPREAD) * ROTATIONS;
                    let fours = integers.as_chunks::<4>().0;
                    panel[within..].iter_mut().step_by(PANEL).zip(fours).for_each(|(out, four)| *out = u32::from_le_bytes(*four));
                    for (round, part) in integers.chunks(ROUND).enumerate() {
                        offsets[round * PANEL + within] = -128 * part.iter().map(|v| i32::from(*v as i8)).sum::<i32>();
                    }
                }
            },
        );
        Self { words, offsets, scales, k, n }
    }
}

/// Buffers of [`product`].
#[derive(Debug, Default)]
pub(super) struct Scratch {
    rotated: Block<f32>,
    row: Block<u8>,
    rows: Block<u32>,
    scales: Block<f32>,
}

/// `out = x * weights` (or `out += ...`).
///
/// Panics if a slice is shorter than its shape says, which is a mistake of the caller in this module tree.
pub(super) fn product(way: Way, x: Rows<'_>, weights: &Weights, scratch: &mut Scratch, out: &mut [f32], store: Store) {
    let n = weights.n;
    assert!(x.width == weights.k && out.len() >= x.rows * n, "shapes of the product do not fit");
    let (all, rounds) = (x.width.next_multiple_of(SPREAD), x.width.div_ceil(ROUND));
    for (round, at) in (0..x.width).step_by(ROUND).enumerate() {
        let inputs = ROUND.min(x.width - at);
        let width = inputs.next_multiple_of(SPREAD);
        scratch.rotated.reserve(width);
        scratch.row.reserve(width);
        scratch.rows.reserve(x.rows * width / 4);
        scratch.scales.reserve(x.rows);
        // Blocks of [`BLOCK`] rows (the last may be shorter), each four integers by four.
        for first in (0..x.rows).step_by(BLOCK) {
            let rows = BLOCK.min(x.rows - first);
            let block = &mut scratch.rows[first * width / 4..(first + rows) * width / 4];
            for r in 0..rows {
                let source = &x.data[(first + r) * x.stride + at..][..inputs];
                scratch.scales[first + r] = quantise(Isa::best(), source, &mut scratch.rotated, &mut scratch.row[..width], SPREAD);
                for (column, four) in block.chunks_exact_mut(rows).zip(scratch.row.as_chunks::<4>().0) {
                    column[r] = u32::from_le_bytes(*four) ^ way.flip();
                }
            }
        }
        let store = if round == 0 { store } else { Store::Add };
        for (p, panel) in weights.words.chunks_exact(PANEL * all / 4).enumerate() {
            let columns = (n - p * PANEL).min(PANEL);
            for first in (0..x.rows).step_by(BLOCK) {
                let rows = BLOCK.min(x.rows - first);
                let tile = Tile {
                    x: &scratch.rows[first * width / 4..(first + rows) * width / 4],
                    panel: &panel[at / 4 * PANEL..(at + width) / 4 * PANEL],
                    offsets: &weights.offsets[(p * rounds + round) * PANEL..][..PANEL],
                    row_scales: &scratch.scales[first..first + rows],
                    column_scales: &weights.scales[p * PANEL..][..PANEL],
                    columns,
                    store,
                };
                let out = &mut out[first * n + p * PANEL..];
                match way {
                    // SAFETY: the processor was found to have these instructions.
                    #[cfg(target_arch = "x86_64")]
                    Way::Dot => unsafe { tile.dot(out, n) },
                    // SAFETY: as above.
                    #[cfg(target_arch = "x86_64")]
                    Way::Avx2 => unsafe { tile.avx2(out, n) },
                    Way::Portable => tile.portable(out, n),
                }
            }
        }
    }
}

/// A block of rows and a panel, in one round.
struct Tile<'a> {
    x: &'a [u32],
    panel: &'a [u32],
    offsets: &'a [i32],
    row_scales: &'a [f32],
    column_scales: &'a [f32],
    columns: usize,
    store: Store,
}

impl Tile<'_> {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512vnni")]
    fn dot(&self, out: &mut [f32], stride: usize) {
        macro_rules! by_rows {
            ($($r:literal)+) => {
                match self.row_scales.len() {
                    $($r => self.dot_rows::<$r>(out, stride),)+
                    _ => unreachable!("a tile has at most a block of rows"),
                }
            };
        }
        by_rows!(1 2 3 4 5 6 7 8 9);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512vnni")]
    fn dot_rows<const R: usize>(&self, out: &mut [f32], stride: usize) {
        use std::arch::x86_64::*;
        // SAFETY: there are as many offsets as a panel has columns.
        let start: [__m512i; 3] = std::array::from_fn(|c| unsafe { _mm512_loadu_si512(self.offsets[c * 16..][..16].as_ptr().cast()) });
        let mut acc = [start; R];
        for (x, panel) in self.x.as_chunks::<R>().0.iter().zip(self.panel.as_chunks::<PANEL>().0) {
            // SAFETY: a panel has 48 words a step.
            let b: [__m512i; 3] = std::array::from_fn(|c| unsafe { _mm512_loadu_si512(panel.as_ptr().add(c * 16).cast()) });
            for (acc, x) in acc.iter_mut().zip(x) {
                let a = _mm512_set1_epi32(*x as i32);
                for (acc, b) in acc.iter_mut().zip(&b) {
                    *acc = _mm512_dpbusd_epi32(*acc, a, *b);
                }
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            let line = &mut out[r * stride..][..self.columns];
            let row_scale = _mm512_set1_ps(self.row_scales[r]);
            for (c, acc) in acc.iter().enumerate() {
                let left = self.columns.saturating_sub(c * 16).min(16);
                let mask = ((1_u32 << left) - 1) as __mmask16;
                let at = line.as_mut_ptr().wrapping_add(c * 16);
                // SAFETY: there are as many scales as a panel has columns; the mask keeps loads and stores inside the line.
                unsafe {
                    let scales = _mm512_loadu_ps(self.column_scales[c * 16..][..16].as_ptr());
                    let value = _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(*acc), row_scale), scales);
                    let value = if self.store == Store::Add { _mm512_add_ps(_mm512_maskz_loadu_ps(mask, at), value) } else { value };
                    _mm512_mask_storeu_ps(at, mask, value);
                }
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2")]
    fn avx2(&self, out: &mut [f32], stride: usize) {
        use std::arch::x86_64::*;
        let rows = self.row_scales.len();
        for r in 0..rows {
            let mut sums = [0; PANEL];
            for (half, sums) in sums.as_chunks_mut::<24>().0.iter_mut().enumerate() {
                let mut acc = [_mm256_setzero_si256(); 3];
                for (x, panel) in self.x.iter().skip(r).step_by(rows).zip(self.panel.as_chunks::<PANEL>().0) {
                    let x = _mm256_set1_epi32(*x as i32);
                    let size = _mm256_abs_epi8(x);
                    for (c, acc) in acc.iter_mut().enumerate() {
                        // SAFETY: a panel has 48 words a step.
                        let w = unsafe { _mm256_loadu_si256(panel.as_ptr().add(half * 24 + c * 8).cast()) };
                        // Two products of at most 127 x 127 fit 16 bits.
                        let pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(w, x));
                        *acc = _mm256_add_epi32(*acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
                    }
                }
                for (sums, acc) in sums.as_chunks_mut::<8>().0.iter_mut().zip(acc) {
                    // SAFETY: 8 words.
                    unsafe { _mm256_storeu_si256(sums.as_mut_ptr().cast(), acc) };
                }
            }
            self.write(r, &sums, out, stride);
        }
    }

    fn portable(&self, out: &mut [f32], stride: usize) {
        let rows = self.row_scales.len();
        for r in 0..rows {
            let mut sums = [0; PANEL];
            for (x, panel) in self.x.iter().skip(r).step_by(rows).zip(self.panel.as_chunks::<PANEL>().0) {
                for (sum, w) in sums.iter_mut().zip(panel) {
                    let product = |(x, w): (u8, u8)| i32::from(x as i8) * i32::from(w as i8);
                    *sum += x.to_le_bytes().into_iter().zip(w.to_le_bytes()).map(product).sum::<i32>();
                }
            }
            self.write(r, &sums, out, stride);
        }
    }

    /// Writes or adds what the sums of a row are worth.
    #[inline(always)]
    fn write(&self, r: usize, sums: &[i32; PANEL], out: &mut [f32], stride: usize) {
        let line = &mut out[r * stride..][..self.columns];
        for ((out, sum), scale) in line.iter_mut().zip(sums).zip(self.column_scales) {
            let value = *sum as f32 * self.row_scales[r] * scale;
            *out = if self.store == Store::Add { *out + value } else { value };
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::kernels::floats;
    use super::super::of;
    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn products_are_near_f64_and_have_the_same_bits_on_every_path(
            m in 1usize..30, n in 1usize..120, k in prop_oneof![1usize..200, 1500usize..1700], seed in 0u64..1000,
        ) {
            let (mut x, mut w) = (floats(m * k, seed), floats(n * k, seed + 1));
            // A number that would leave all others few steps.
            x[k / 2] = 40.0;
            w[k / 3] = -9.0;
            let rows = Rows { data: &x, rows: m, width: k, stride: k };
            let weights = Weights::pack(k, n, &of(k, &w));
            let mut scratch = Scratch::default();
            let mut first: Option<Vec<f32>> = None;
            for way in Way::available() {
                let mut out = vec![1.0_f32; m * n];
                product(way, rows, &weights, &mut scratch, &mut out, Store::Add);
                for r in 0..m {
                    for c in 0..n {
                        let (x, w) = (&x[r * k..][..k], &w[c * k..][..k]);
                        let exact: f64 = x.iter().zip(w).map(|(x, w)| f64::from(*x) * f64::from(*w)).sum();
                        let size = |v: &[f32]| v.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
                        // Rounding to one of 255 steps is an error of 1/880 of the largest number on each, and that is at most 6 times the mean one here.
                        let off = (f64::from(out[r * n + c]) - 1.0 - exact).abs() / (size(x) * size(w));
                        prop_assert!(off < 0.06 / (k.min(64) as f64).sqrt() + 1e-6, "{way:?} {off}");
                    }
                }
                prop_assert!(*first.get_or_insert_with(|| out.clone()) == out, "{way:?}");
                // A row alone has the bits it has among others.
                let mut alone = vec![1.0_f32; n];
                product(way, Rows { data: &x[(m - 1) * k..], rows: 1, ..rows }, &weights, &mut scratch, &mut alone, Store::Add);
                prop_assert!(alone[..] == out[(m - 1) * n..]);
            }
            #[cfg(target_arch = "x86_64")]
            if super::super::amx::available() {
                use super::super::amx;
                let weights = amx::Weights::pack(super::super::Precision::Int8, k, n, &of(k, &w));
                let mut out = vec![1.0_f32; m * n];
                amx::product(rows, &weights, &mut amx::Scratch::default(), &mut out, Store::Add);
                prop_assert!(first == Some(out));
            }
        }

        #[test]
        fn integers_are_the_same_on_every_path_and_give_the_numbers_back(k in 1usize..300, seed in 0u64..1000) {
            let x = floats(k, seed);
            let width = k.next_multiple_of(SPREAD);
            let mut first: Option<(Vec<u8>, f32)> = None;
            for isa in Isa::available() {
                let (mut rotated, mut integers) = (vec![0.0; width], vec![0; width]);
                let scale = quantise(isa, &x, &mut rotated, &mut integers, SPREAD);
                for (b, block) in integers.chunks(SPREAD).enumerate() {
                    for i in 0..SPREAD.min(k - b * SPREAD) {
                        // The matrix by its definition: the sign is the parity of the bits that both indices have.
                        let sign = |j: usize| if (i & j).count_ones().is_multiple_of(2) { 1.0 } else { -1.0 };
                        let sum: f32 = block.iter().enumerate().map(|(j, v)| f32::from(*v as i8) * sign(j)).sum();
                        prop_assert!((sum * scale * ROTATIONS - x[b * SPREAD + i]).abs() < 0.5001 * scale, "{isa:?}");
                    }
                }
                prop_assert_eq!(first.get_or_insert_with(|| (integers.clone(), scale)), &(integers, scale));
            }
        }
    }

    #[test]
    fn what_is_not_finite_stays_so_and_zeros_are_zero() {
        for (value, finite) in [(0.0, true), (1e-38, true), (f32::NAN, false), (f32::INFINITY, false)] {
            let mut x = vec![0.0; 70];
            x[3] = value;
            let weights = Weights::pack(70, 1, &of(70, &floats(70, 1)));
            for way in Way::available() {
                let mut out = [0.0];
                let rows = Rows { data: &x, rows: 1, width: 70, stride: 70 };
                product(way, rows, &weights, &mut Scratch::default(), &mut out, Store::Set);
                assert_eq!(out[0].is_finite(), finite, "{value}");
                assert!(!finite || out[0].abs() < 1e-30);
            }
        }
    }
}
