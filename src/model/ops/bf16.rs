//! Products of bf16 numbers: weights rounded once, rows when they come, sums in f32.
//!
//! Two numbers of a row lie side by side in 32 bits, as the dot products of AVX-512 BF16 take them. Elsewhere both are widened and go through f32
//! multiply-adds; sums may then differ in their last bits, which is another machine.
#![allow(unsafe_code)]

use std::sync::OnceLock;

use rayon::prelude::*;

use super::Row;
use super::kernels::{BLOCK, Isa, PANEL, Rows, Store, dot_pairs, pair, round_pairs};
use super::memory::Block;

/// How products are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    /// By the dot products of AVX-512 BF16.
    #[cfg(target_arch = "x86_64")]
    Dot,
    /// By f32 multiply-adds.
    Loop(Isa),
}

impl Way {
    /// Every way this processor can go.
    pub(super) fn available() -> Vec<Self> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        if Isa::best() == Isa::Avx512 && is_x86_feature_detected!("avx512bf16") {
            all.push(Self::Dot);
        }
        all.extend(Isa::available().into_iter().map(Self::Loop));
        all
    }

    /// The fastest of [`Self::available`].
    pub(super) fn best() -> Self {
        static BEST: OnceLock<Way> = OnceLock::new();
        *BEST.get_or_init(|| Self::available()[0])
    }
}

/// Weights in panels of [`PANEL`] columns: for each two steps of k, a pair of each column.
#[derive(Debug)]
pub(super) struct Weights {
    pairs: Block<u32>,
    k: usize,
    n: usize,
}

impl Weights {
    /// Packs rows of `k` weights, `n` of them.
    pub(super) fn pack(k: usize, n: usize, row: Row<'_>) -> Self {
        let steps = k.div_ceil(2);
        let mut pairs = Block::beside_others(n.div_ceil(PANEL) * PANEL * steps);
        pairs.par_chunks_mut(PANEL * steps).enumerate().for_each_init(
            || vec![0.0; k],
            |floats, (p, panel)| {
                for within in (0..PANEL).filter(|within| p * PANEL + within < n) {
                    row(p * PANEL + within, floats);
                    panel[within..].iter_mut().step_by(PANEL).zip(floats.chunks(2)).for_each(|(out, values)| *out = pair(values));
                }
            },
        );
        Self { pairs, k, n }
    }

    /// The weights of one output, from input `start` on.
    pub(super) fn read(&self, output: usize, start: usize, out: &mut [f32]) {
        let panel = &self.pairs[output / PANEL * PANEL * self.k.div_ceil(2)..];
        for (input, out) in (start..).zip(out) {
            let pair = panel[input / 2 * PANEL + output % PANEL];
            *out = f32::from_bits(if input % 2 == 0 { pair << 16 } else { pair & 0xFFFF_0000 });
        }
    }
}

/// Packs rows into blocks of [`BLOCK`] (the last may be shorter), each block pair by pair.
fn pack_rows(x: Rows<'_>, packed: &mut Block<u32>) {
    let steps = x.width.div_ceil(2);
    packed.reserve((x.rows + 1) * steps);
    // The row at hand lies behind all others.
    let (packed, row) = packed.split_at_mut(x.rows * steps);
    for first in (0..x.rows).step_by(BLOCK) {
        let rows = BLOCK.min(x.rows - first);
        let block = &mut packed[first * steps..(first + rows) * steps];
        for r in 0..rows {
            round_pairs(Isa::best(), &x.data[(first + r) * x.stride..][..x.width], row);
            for (column, pair) in block.chunks_exact_mut(rows).zip(&*row) {
                column[r] = *pair;
            }
        }
    }
}

/// `out = x * weights` (or `out += ...`).
///
/// Panics if a slice is shorter than its shape says, which is a mistake of the caller in this module tree.
pub(super) fn product(way: Way, x: Rows<'_>, weights: &Weights, packed: &mut Block<u32>, out: &mut [f32], store: Store) {
    let (n, steps) = (weights.n, x.width.div_ceil(2));
    assert!(x.width == weights.k && out.len() >= x.rows * n, "shapes of the product do not fit");
    pack_rows(x, packed);
    for (p, panel) in weights.pairs.chunks_exact(PANEL * steps.max(1)).take(n.div_ceil(PANEL)).enumerate() {
        let columns = (n - p * PANEL).min(PANEL);
        for first in (0..x.rows).step_by(BLOCK) {
            let rows = BLOCK.min(x.rows - first);
            let tile = Tile { x: &packed[first * steps..(first + rows) * steps], rows, panel, columns, store };
            let out = &mut out[first * n + p * PANEL..];
            match way {
                // SAFETY: the processor was found to have these instructions.
                #[cfg(target_arch = "x86_64")]
                Way::Dot => unsafe { tile.dot(out, n) },
                Way::Loop(isa) => tile.looped(isa, out, n),
            }
        }
    }
}

/// A block of packed rows and a panel.
struct Tile<'a> {
    x: &'a [u32],
    rows: usize,
    panel: &'a [u32],
    columns: usize,
    store: Store,
}

impl Tile<'_> {
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bf16")]
    fn dot(&self, out: &mut [f32], stride: usize) {
        macro_rules! by_rows {
            ($($r:literal)+) => {
                match (self.rows, self.columns.div_ceil(16)) {
                    $(($r, 1) => self.dot_rows::<$r, 1>(out, stride),
                    ($r, 2) => self.dot_rows::<$r, 2>(out, stride),
                    ($r, _) => self.dot_rows::<$r, 3>(out, stride),)+
                    _ => unreachable!("a tile has at most a block of rows"),
                }
            };
        }
        by_rows!(1 2 3 4 5 6 7 8 9);
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f,avx512bf16")]
    fn dot_rows<const R: usize, const C: usize>(&self, out: &mut [f32], stride: usize) {
        use std::arch::x86_64::*;
        use std::mem::transmute;
        let mut acc = [[_mm512_setzero_ps(); C]; R];
        for (x, panel) in self.x.as_chunks::<R>().0.iter().zip(self.panel.as_chunks::<PANEL>().0) {
            let mut b = [_mm512_setzero_si512(); C];
            for (c, b) in b.iter_mut().enumerate() {
                // SAFETY: a panel has 48 words a step.
                *b = unsafe { _mm512_loadu_si512(panel.as_ptr().add(c * 16).cast()) };
            }
            for (acc, x) in acc.iter_mut().zip(x) {
                let a = _mm512_set1_epi32(*x as i32);
                for (acc, b) in acc.iter_mut().zip(&b) {
                    // SAFETY: the types differ in name alone.
                    *acc = unsafe { _mm512_dpbf16_ps(*acc, transmute::<__m512i, __m512bh>(a), transmute::<__m512i, __m512bh>(*b)) };
                }
            }
        }
        for (r, acc) in acc.iter().enumerate() {
            let line = &mut out[r * stride..][..self.columns];
            for (c, acc) in acc.iter().enumerate() {
                let mask = ((1_u32 << (self.columns - c * 16).min(16)) - 1) as __mmask16;
                let at = line.as_mut_ptr().wrapping_add(c * 16);
                // SAFETY: the mask keeps loads and stores inside the line.
                unsafe {
                    let value = if self.store == Store::Add { _mm512_add_ps(_mm512_maskz_loadu_ps(mask, at), *acc) } else { *acc };
                    _mm512_mask_storeu_ps(at, mask, value);
                }
            }
        }
    }

    fn looped(&self, isa: Isa, out: &mut [f32], stride: usize) {
        for r in 0..self.rows {
            let mut sums = [0.0; PANEL];
            dot_pairs(isa, self.x, self.rows, r, self.panel, &mut sums);
            let line = &mut out[r * stride..][..self.columns];
            for (out, sum) in line.iter_mut().zip(sums) {
                *out = if self.store == Store::Add { *out + sum } else { sum };
            }
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
        fn products_match_f64_on_ragged_shapes(m in 1usize..30, n in 1usize..120, k in 1usize..90, seed in 0u64..1000) {
            let (x, w) = (floats(m * k, seed), floats(n * k, seed + 1));
            let weights = Weights::pack(k, n, &of(k, &w));
            let value = |v: f32| f64::from(::half::bf16::from_f32(v).to_f32());
            for way in Way::available() {
                let rows = Rows { data: &x, rows: m, width: k, stride: k };
                let (mut packed, mut out) = (Block::default(), vec![1.0_f32; m * n]);
                product(way, rows, &weights, &mut packed, &mut out, Store::Add);
                for r in 0..m {
                    for c in 0..n {
                        let exact: f64 = (0..k).map(|i| value(x[r * k + i]) * value(w[c * k + i])).sum();
                        prop_assert!((f64::from(out[r * n + c]) - 1.0 - exact).abs() < 2e-5, "{way:?}");
                    }
                }
                // A row alone has the bits it has among others.
                let mut alone = vec![1.0_f32; n];
                product(way, Rows { data: &x[(m - 1) * k..], rows: 1, ..rows }, &weights, &mut packed, &mut alone, Store::Add);
                prop_assert_eq!(&alone[..], &out[(m - 1) * n..]);
            }
        }
    }
}
