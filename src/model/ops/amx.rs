//! Products on the tile unit of newer x86 processors (AMX), which multiplies bf16 numbers only: of bf16 numbers as they are, and of f32 numbers in parts.
//!
//! A float is the sum of three bf16 numbers, 8 bits of its mantissa each: x = x1 + x2 + x3 exactly. Of the nine partial products of two
//! floats the six largest are computed, exactly, and added up in f32; the three left out are below 2^-24 of the product. So the result
//! is as close to the true one as that of ordinary f32 arithmetic, at more than twice its speed. Rows go through one fixed sequence of
//! operations each, so that their bits do not depend on their neighbours. The unit multiplies 8-bit integers too, at twice the speed ([`int8`](super::int8)).
#![allow(unsafe_code)]

mod attention;

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _MM_HINT_T1, _mm_prefetch};
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

use rayon::prelude::*;

use super::Row;
use super::device::Precision;
use super::int8::{ROTATIONS, ROUND};
use super::kernels::{Activation, Isa, Rows, SPREAD, Store, power_of_two, quantise, split_parts};
use super::memory::{Block, Plain};
pub(super) use attention::{AttentionScratch, attention};

/// Rows and columns of a tile.
const SIDE: usize = 16;
/// bf16 numbers of a row of a tile: what it takes of k.
const DEPTH: usize = 32;
/// bf16 numbers of a tile.
const TILE: usize = SIDE * DEPTH;
/// Tiles along k that are multiplied without a stop; longer rows are added up in several rounds.
const SLICE: usize = 24;
const _: () = assert!(SPREAD == 2 * DEPTH && SLICE * SPREAD == ROUND, "a round of integers is a slice of tiles");
/// Tiles of rows that go through all columns together: they stay in the second-level cache meanwhile.
const ROW_TILES: usize = 1920;
/// Tiles of a pair of columns' blocks that stay in the first-level cache, beside the rows that stream through it.
const NEAR: usize = 12;
/// bf16 parts of a float.
const PARTS: usize = 3;

/// Whether this process may use the tile unit. Asks the system for leave the first time.
pub(super) fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        const AMX_BF16: u32 = 1 << 22;
        const AMX_TILE: u32 = 1 << 24;
        const AMX_INT8: u32 = 1 << 25;
        const ALL: u32 = AMX_BF16 | AMX_TILE | AMX_INT8;
        let leaf = __cpuid(0).eax;
        let has = leaf >= 7 && __cpuid_count(7, 0).edx & ALL == ALL;
        has && cfg!(target_os = "linux") && Isa::best() == Isa::Avx512 && permitted()
    })
}

/// Whether a gated layer of so many inputs can be one operation: its sums are not stopped between rounds.
pub(super) fn fuses(precision: Precision, inputs: usize) -> bool {
    precision != Precision::Int8 || inputs <= ROUND
}

/// Asks Linux for the use of tile data: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
fn permitted() -> bool {
    let result: isize;
    // SAFETY: this system call reads and writes no memory of the process; it only changes what the process may use. The kernel
    // clobbers rcx and r11.
    unsafe {
        asm!("syscall", inlateout("rax") 158_isize => result, in("rdi") 0x1023, in("rsi") 18, out("rcx") _, out("r11") _, options(nostack));
    }
    result == 0
}

/// 16 rows of 32 bf16 numbers or 64 integers.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct TileData([u16; TILE]);

// SAFETY: all bits zero is 0 in each number.
unsafe impl Plain for TileData {}

/// Weights in tiles: for each pair of column blocks, each step of k, the parts of both blocks.
#[derive(Debug)]
pub(super) struct Weights {
    tiles: Block<TileData>,
    k: usize,
    n: usize,
    precision: Precision,
    /// Parts that are not all zero: 1 for a checkpoint in bf16, 2 for most quantised ones.
    parts: usize,
    /// In int8, what an integer of each column is worth.
    scales: Vec<f32>,
}

impl Weights {
    pub(super) fn precision(&self) -> Precision {
        self.precision
    }

    /// Parts of the rows that are multiplied by the weights.
    fn row_parts(&self) -> usize {
        if self.precision == Precision::F32 { PARTS } else { 1 }
    }

    /// Numbers of a row that a tile takes.
    fn depth(&self) -> usize {
        if self.precision == Precision::Int8 { SPREAD } else { DEPTH }
    }

    /// Packs rows of `k` weights, `n` of them: in f32 all their parts, in bf16 the first alone.
    pub(super) fn pack(precision: Precision, k: usize, n: usize, row: Row<'_>) -> Self {
        let parts = if precision == Precision::F32 { used_parts(k, n, row) } else { 1 };
        let mut weights = Self { tiles: Block::default(), k, n, precision, parts, scales: Vec::new() };
        let (steps, pairs) = (k.div_ceil(weights.depth()), n.div_ceil(2 * SIDE));
        weights.tiles = Block::beside_others(pairs * steps * parts * 2);
        weights.scales = vec![0.0; pairs * 2 * SIDE];
        let all = weights.tiles.par_chunks_mut(steps * parts * 2).zip(weights.scales.par_chunks_mut(2 * SIDE));
        all.enumerate().for_each_init(
            || Columns::new(precision, k, steps, parts),
            |columns, (pair, (tiles, scales))| {
                for (block, scales) in scales.chunks_exact_mut(SIDE).enumerate() {
                    for (within, scale) in scales.iter_mut().enumerate() {
                        let column = (pair * 2 + block) * SIDE + within;
                        *scale = columns.take(within, |floats| column < n && row(column, floats));
                    }
                    tiles[block..].iter_mut().step_by(2).enumerate().for_each(|(at, tile)| columns.lay(at, tile));
                }
            },
        );
        weights
    }

    /// The weights of one output from input `start` on, which must be bf16.
    pub(super) fn read(&self, output: usize, start: usize, out: &mut [f32]) {
        let steps = self.k.div_ceil(DEPTH);
        let (pair, block, within) = (output / (2 * SIDE), output / SIDE % 2, output % SIDE);
        for (input, out) in (start..).zip(out) {
            let tile = &self.tiles[(pair * steps + input / DEPTH) * 2 + block];
            *out = f32::from_bits(u32::from(tile.0[input % DEPTH / 2 * DEPTH + within * 2 + input % 2]) << 16);
        }
    }

    /// Packs two layers of `width` outputs over one input for [`gated`]: blocks of 16 columns of the one and of the other take turns, up to whole tiles.
    /// `row` gets a layer, 0 or 1, and a row.
    pub(super) fn pack_gated(
        precision: Precision,
        k: usize,
        width: usize,
        row: &(dyn Fn(usize, usize, &mut [f32]) -> bool + Sync),
    ) -> Self {
        let of = |column: usize, out: &mut [f32]| row(column / SIDE % 2, column / (2 * SIDE) * SIDE + column % SIDE, out);
        Self::pack(precision, k, 2 * width.next_multiple_of(DEPTH), &of)
    }
}

/// How many parts of some weights are not all zero.
fn used_parts(k: usize, n: usize, row: Row<'_>) -> usize {
    let most = AtomicUsize::new(1);
    (0..n).into_par_iter().for_each_init(
        || (vec![0.0; k], vec![0; k * PARTS]),
        |(floats, split), column| {
            if most.load(Ordering::Relaxed) < PARTS && row(column, floats) {
                split_parts(Isa::best(), floats, split);
                // Negative zero is zero too.
                let used = |part: &usize| split[part * k..(part + 1) * k].iter().any(|v| v << 1 != 0);
                most.fetch_max((1..PARTS).rev().find(used).unwrap_or(0) + 1, Ordering::Relaxed);
            }
        },
    );
    most.into_inner()
}

/// A block of 16 columns of weights on its way into tiles.
struct Columns {
    precision: Precision,
    parts: usize,
    /// Words of 32 bits of a column: 16 for each step of each part. They hold two bf16 numbers or four integers.
    each: usize,
    words: Vec<u32>,
    floats: Vec<f32>,
    split: Vec<u16>,
    rotated: Vec<f32>,
    integers: Vec<u8>,
}

impl Columns {
    fn new(precision: Precision, k: usize, steps: usize, parts: usize) -> Self {
        let each = steps * SIDE * parts;
        let (mut split, mut rotated, mut integers) = (Vec::new(), Vec::new(), Vec::new());
        if precision == Precision::Int8 {
            (rotated, integers) = (vec![0.0; steps * SPREAD], vec![0; steps * SPREAD]);
        } else {
            split = vec![0; k * PARTS];
        }
        Self { precision, parts, each, words: vec![0; SIDE * each], floats: vec![0.0; k], split, rotated, integers }
    }

    /// Takes a column, if `read` has one, and returns what an integer of it is worth.
    fn take(&mut self, within: usize, read: impl FnOnce(&mut [f32]) -> bool) -> f32 {
        let words = &mut self.words[within * self.each..][..self.each];
        if !read(&mut self.floats) {
            words.fill(0);
            return 0.0;
        }
        if self.precision == Precision::Int8 {
            let scale = quantise(Isa::best(), &self.floats, &mut self.rotated, &mut self.integers, SPREAD);
            words.iter_mut().zip(self.integers.as_chunks::<4>().0).for_each(|(word, four)| *word = u32::from_le_bytes(*four));
            return scale * ROTATIONS;
        }
        split_parts(Isa::best(), &self.floats, &mut self.split);
        for (words, part) in words.chunks_exact_mut(self.each / self.parts).zip(self.split.chunks_exact(self.floats.len())) {
            for (word, pair) in words.iter_mut().zip(part.chunks(2)) {
                *word = u32::from(pair[0]) | pair.get(1).map_or(0, |v| u32::from(*v) << 16);
            }
        }
        0.0
    }

    /// Writes tile `at`, counted by step and then by part: pairs of bf16 numbers or fours of integers of the columns lie side by side.
    fn lay(&self, at: usize, tile: &mut TileData) {
        let first = (at % self.parts * (self.each / self.parts)) + at / self.parts * SIDE;
        for (l, line) in tile.0.as_chunks_mut::<DEPTH>().0.iter_mut().enumerate() {
            for (within, out) in line.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let word = self.words[within * self.each + first + l];
                *out = [word as u16, (word >> 16) as u16];
            }
        }
    }
}

/// Buffers of [`product`] and [`gated`].
#[derive(Debug, Default)]
pub(super) struct Scratch {
    rows: Tiled,
    inner: Tiled,
    rotated: Block<f32>,
}

/// Rows in tiles: for each block of 16 rows and each step of k, the parts.
#[derive(Debug, Default)]
struct Tiled {
    tiles: Block<TileData>,
    /// In int8, what an integer of each row is worth.
    scales: Block<f32>,
}

impl Tiled {
    fn pack(&mut self, x: Rows<'_>, precision: Precision, rotated: &mut Block<f32>) {
        match precision {
            // SAFETY: where tiles are used, the processor has these instructions (`available`).
            Precision::F32 => unsafe { pack_rows(x, PARTS, &mut self.tiles) },
            // SAFETY: as above.
            Precision::Bf16 => unsafe { pack_rows(x, 1, &mut self.tiles) },
            Precision::Int8 => self.pack_integers(x, rotated),
        }
    }

    fn pack_integers(&mut self, x: Rows<'_>, rotated: &mut Block<f32>) {
        let (steps, blocks) = (x.width.div_ceil(SPREAD), x.rows.div_ceil(SIDE));
        self.tiles.reserve(blocks * steps);
        self.scales.reserve(blocks * SIDE);
        rotated.reserve(steps * SPREAD);
        for (r, scale) in self.scales.iter_mut().enumerate().take(x.rows) {
            let tiles = &mut self.tiles[r / SIDE * steps..][..steps];
            // SAFETY: tiles are bytes, 1024 each.
            let bytes = unsafe { std::slice::from_raw_parts_mut(tiles.as_mut_ptr().cast::<u8>(), size_of_val(tiles)) };
            let row = &x.data[r * x.stride..][..x.width];
            *scale = quantise(Isa::best(), row, rotated, &mut bytes[r % SIDE * SPREAD..], size_of::<TileData>());
        }
    }
}

/// Sums of two blocks of rows times two blocks of columns: upper left tile, upper right, lower left, lower right. Floats, or in int8 the bits of integers.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Sums([[[f32; SIDE]; SIDE]; 4]);

// SAFETY: all bits zero is 0 in each sum.
unsafe impl Plain for Sums {}

impl Sums {
    const ZERO: Self = Self([[[0.0; SIDE]; SIDE]; 4]);
}

/// What integers are worth: by row, and by column of a pair of blocks.
#[derive(Clone, Copy)]
struct Scales<'a> {
    rows: &'a [f32],
    columns: &'a [f32],
}

/// A row of a tile of sums as floats; `scales` are those of the row and of its 16 columns, where the sums are integers.
#[target_feature(enable = "avx512f")]
#[inline]
fn worth(sums: &[f32; SIDE], scales: Option<(f32, &[f32])>) -> std::arch::x86_64::__m512 {
    use std::arch::x86_64::*;
    // SAFETY: 16 floats each.
    unsafe {
        let Some((row, columns)) = scales else { return _mm512_loadu_ps(sums.as_ptr()) };
        let sums = _mm512_cvtepi32_ps(_mm512_loadu_si512(sums.as_ptr().cast()));
        _mm512_mul_ps(_mm512_mul_ps(sums, _mm512_set1_ps(row)), _mm512_loadu_ps(columns[..SIDE].as_ptr()))
    }
}

/// Where the upper halves of the floats of two registers lie: the odd words.
#[target_feature(enable = "avx512f")]
#[inline]
fn odd_words() -> std::arch::x86_64::__m512i {
    let odd: [u16; 32] = std::array::from_fn(|i| 2 * i as u16 + 1);
    // SAFETY: `odd` is 64 bytes.
    unsafe { std::arch::x86_64::_mm512_loadu_si512(odd.as_ptr().cast()) }
}

/// Takes the next bf16 parts off 32 floats: their words in order. What is left of the floats stays in `rest`.
#[target_feature(enable = "avx512f,avx512bw")]
#[inline]
fn next_part(rest: &mut [std::arch::x86_64::__m512; 2], odd: std::arch::x86_64::__m512i) -> std::arch::x86_64::__m512i {
    use std::arch::x86_64::*;
    let part = [round(rest[0]), round(rest[1])];
    *rest = [_mm512_sub_ps(rest[0], part[0]), _mm512_sub_ps(rest[1], part[1])];
    _mm512_permutex2var_epi16(_mm512_castps_si512(part[0]), odd, _mm512_castps_si512(part[1]))
}

/// Splits rows into tiles: for each block of 16 rows and each step of k, the parts.
#[target_feature(enable = "avx512f,avx512bw")]
fn pack_rows(x: Rows<'_>, parts: usize, tiles: &mut Block<TileData>) {
    use std::arch::x86_64::*;
    let odd = odd_words();
    let steps = x.width.div_ceil(DEPTH);
    tiles.reserve(x.rows.div_ceil(SIDE) * steps * parts);
    for (block, tiles) in tiles.chunks_exact_mut(steps * parts).take(x.rows.div_ceil(SIDE)).enumerate() {
        for (step, tiles) in tiles.chunks_exact_mut(parts).enumerate() {
            let at = step * DEPTH;
            let mask = ((1_u64 << (x.width - at).min(DEPTH)) - 1) as u32;
            for r in 0..SIDE {
                let row = block * SIDE + r;
                let mut rest = [_mm512_setzero_ps(); 2];
                if row < x.rows {
                    let line = x.data[row * x.stride + at..].as_ptr();
                    // SAFETY: the mask keeps the loads inside the row.
                    rest = unsafe {
                        [_mm512_maskz_loadu_ps(mask as u16, line), _mm512_maskz_loadu_ps((mask >> 16) as u16, line.wrapping_add(16))]
                    };
                }
                for tile in tiles.iter_mut() {
                    let words = next_part(&mut rest, odd);
                    // SAFETY: row `r` of a tile is 64 bytes.
                    unsafe { _mm512_store_si512(tile.0[r * DEPTH..(r + 1) * DEPTH].as_mut_ptr().cast(), words) };
                }
            }
        }
    }
}

/// The nearest bf16 numbers, ties to even, as floats.
#[target_feature(enable = "avx512f")]
#[inline]
fn round(v: std::arch::x86_64::__m512) -> std::arch::x86_64::__m512 {
    use std::arch::x86_64::*;
    let bits = _mm512_castps_si512(v);
    let even = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let raised = _mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff)));
    _mm512_castsi512_ps(_mm512_and_si512(raised, _mm512_set1_epi32(0xffff_0000_u32 as i32)))
}

#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// All eight tiles of full size.
static CONFIG: Config = Config {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// Runs work that uses tile registers. Must only be called where [`available`].
fn with_tiles(work: impl FnOnce()) {
    assert!(available(), "no tile unit");
    // SAFETY: the tile unit may be used, and CONFIG is a valid configuration.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, readonly)) };
    work();
    // SAFETY: as above.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

/// Of `rows`, how many go through all columns together: their tiles, `steps` for each part of a block, fit the second-level cache.
fn rows_at_once(rows: usize, steps: usize, parts: usize) -> usize {
    let most = (ROW_TILES / (2 * steps * parts)).max(1) * 2 * SIDE;
    rows.div_ceil(rows.div_ceil(most).max(1)).next_multiple_of(2 * SIDE).max(2 * SIDE)
}

/// `out = x * weights` (or `out += ...`). Must only be called where [`available`].
///
/// Panics if a slice is shorter than its shape says, which is a mistake of the caller in this module tree.
pub(super) fn product(x: Rows<'_>, weights: &Weights, scratch: &mut Scratch, out: &mut [f32], store: Store) {
    let n = weights.n;
    assert!(x.width == weights.k && out.len() >= x.rows * n, "shapes of the product do not fit");
    let (depth, row_parts) = (weights.depth(), weights.row_parts());
    let all = x.width.div_ceil(depth);
    with_tiles(|| {
        for slice in (0..all).step_by(SLICE) {
            let steps = slice..all.min(slice + SLICE);
            let width = (x.width - slice * depth).min(SLICE * depth);
            let store = if slice == 0 { store } else { Store::Add };
            let group = rows_at_once(x.rows, steps.len(), row_parts);
            for first in (0..x.rows).step_by(group) {
                let x = Rows { data: &x.data[first * x.stride + slice * depth..], rows: group.min(x.rows - first), width, ..x };
                let out = &mut out[first * n..];
                scratch.rows.pack(x, weights.precision, &mut scratch.rotated);
                multiply_into(&scratch.rows, x.rows, weights, steps.clone(), out, store);
            }
        }
    });
}

/// `out += (activation(x * gate) * (x * up)) * down`, where `gate_up` is packed by [`Weights::pack_gated`] and the bias holds gate, then up.
/// Must only be called where [`available`].
///
/// Panics if a slice is shorter than its shape says, which is a mistake of the caller in this module tree.
pub(super) fn gated(
    x: Rows<'_>,
    activation: Activation,
    gate_up: &Weights,
    bias: Option<&[f32]>,
    down: &Weights,
    scratch: &mut Scratch,
    out: &mut [f32],
) {
    let n = down.n;
    let (inputs, all, parts) = (x.width.div_ceil(gate_up.depth()), down.k.div_ceil(DEPTH), down.row_parts());
    assert!(x.width == gate_up.k && gate_up.n == 2 * all * DEPTH && out.len() >= x.rows * n, "shapes of the layer do not fit");
    assert!(down.precision != Precision::Int8, "what goes into the second layer has no scale");
    assert!(bias.is_none_or(|bias| bias.len() == 2 * down.k), "bias of another size");
    let group = rows_at_once(x.rows, inputs + all.min(SLICE), parts);
    with_tiles(|| {
        let Scratch { rows: tiled, inner, rotated } = scratch;
        for first in (0..x.rows).step_by(group) {
            let x = Rows { data: &x.data[first * x.stride..], rows: group.min(x.rows - first), ..x };
            let out = &mut out[first * n..];
            tiled.pack(x, gate_up.precision, rotated);
            for slice in (0..all).step_by(SLICE) {
                let steps = slice..all.min(slice + SLICE);
                inner.tiles.reserve(x.rows.div_ceil(SIDE) * steps.len() * parts);
                multiply(tiled, x.rows, gate_up, 0..inputs, 2 * steps.start..2 * steps.end, &mut |sums, scales, row, pair| {
                    let bias = bias.map(|bias| bias.split_at(down.k)).map(|(gate, up)| {
                        let columns = (pair * SIDE).min(down.k)..((pair + 1) * SIDE).min(down.k);
                        (&gate[columns.clone()], &up[columns])
                    });
                    for (half, sums) in sums.0.as_chunks::<2>().0.iter().enumerate().take((x.rows - row).div_ceil(SIDE)) {
                        let step = (row / SIDE + half) * steps.len() + pair / 2 - steps.start;
                        let scales = scales.map(|s| Scales { rows: &s.rows[half * SIDE..], ..s });
                        let tiles = &mut inner.tiles[step * parts..(step + 1) * parts];
                        // SAFETY: where tiles are used, the processor has these instructions (`available`).
                        unsafe { Gated { sums, scales, activation, bias }.split(tiles, pair % 2 * SIDE) };
                    }
                });
                multiply_into(inner, x.rows, down, steps, out, Store::Add);
            }
        }
    });
}

/// Multiplies rows in tiles by all columns of the weights over some steps of k, into rows of as many floats.
fn multiply_into(x: &Tiled, rows: usize, weights: &Weights, steps: Range<usize>, out: &mut [f32], store: Store) {
    let n = weights.n;
    multiply(x, rows, weights, steps, 0..n.div_ceil(2 * SIDE), &mut |sums, scales, row, pair| {
        // SAFETY: where tiles are used, the processor has these instructions (`available`).
        unsafe { store_sums(sums, scales, rows - row, n - pair * 2 * SIDE, &mut out[row * n + pair * 2 * SIDE..], n, store) };
    });
}

/// What takes sums: with what they are worth in int8, and the row and the pair of blocks of columns at which they start.
type Done<'a> = &'a mut dyn FnMut(&Sums, Option<Scales<'_>>, usize, usize);

/// Multiplies rows in tiles by the weights' columns of some pairs of blocks over some steps of k, and hands each 32 x 32 sums on.
fn multiply(x: &Tiled, rows: usize, weights: &Weights, steps: Range<usize>, pairs: Range<usize>, done: Done<'_>) {
    match (weights.precision, weights.parts) {
        (Precision::Int8, _) => multiply_parts::<1, 1, true>(x, rows, weights, steps, pairs, done),
        (Precision::Bf16, _) => multiply_parts::<1, 1, false>(x, rows, weights, steps, pairs, done),
        (_, 1) => multiply_parts::<PARTS, 1, false>(x, rows, weights, steps, pairs, done),
        (_, 2) => multiply_parts::<PARTS, 2, false>(x, rows, weights, steps, pairs, done),
        _ => multiply_parts::<PARTS, PARTS, false>(x, rows, weights, steps, pairs, done),
    }
}

/// With X parts of rows and W of weights: one of each, or all three of rows. Of integers or of bf16 numbers.
fn multiply_parts<const X: usize, const W: usize, const INT: bool>(
    x: &Tiled,
    rows: usize,
    weights: &Weights,
    steps: Range<usize>,
    pairs: Range<usize>,
    done: Done<'_>,
) {
    let (depth, all) = (steps.len(), weights.k.div_ceil(weights.depth()));
    let blocks = rows.div_ceil(SIDE);
    // All rows go through so many steps before the next ones: the weights of these stay in the first-level cache. Sums wait meanwhile, which costs more than
    // it brings where a step is several products.
    let part = if X == 1 { depth.div_ceil(depth.div_ceil(NEAR)) } else { depth };
    let parts = depth.div_ceil(part);
    let mut sums = vec![Sums::ZERO; if parts > 1 { blocks.div_ceil(2) } else { 1 }];
    for pair in pairs.clone() {
        let of_pair = |pair: usize| &weights.tiles[(pair * all + steps.start) * W * 2..][..depth * W * 2];
        // The weights of the next columns come from the third-level cache or from memory: while these are used, a share of them is
        // fetched with every pair of row blocks.
        let mut ahead = of_pair((pair + 1).min(pairs.end - 1)).chunks((depth * W * 2).div_ceil(blocks.div_ceil(2) * parts));
        for (p, weights_part) in of_pair(pair).chunks(part * W * 2).enumerate() {
            let width = weights_part.len() / (2 * W);
            for first in (0..blocks).step_by(2) {
                // Where there is no second block, the first is multiplied twice.
                let second = (first + 1).min(blocks - 1);
                let tiles = |block: usize| &x.tiles[(block * depth + p * part) * X..][..width * X];
                let sums = &mut sums[if parts > 1 { first / 2 } else { 0 }];
                multiply_blocks::<X, W, INT>(tiles(first), tiles(second), weights_part, p > 0, ahead.next().unwrap_or_default(), sums);
                if p + 1 == parts {
                    let scales = INT.then(|| Scales { rows: &x.scales[first * SIDE..], columns: &weights.scales[pair * 2 * SIDE..] });
                    done(sums, scales, first * SIDE, pair);
                }
            }
        }
    }
}

/// A block of 16 rows and 16 columns of gate and up, still to be activated and multiplied.
struct Gated<'a> {
    sums: &'a [[[f32; SIDE]; SIDE]; 2],
    scales: Option<Scales<'a>>,
    activation: Activation,
    bias: Option<(&'a [f32], &'a [f32])>,
}

impl Gated<'_> {
    /// `activation(gate) * up` of a row; where it is `rounded` to bf16 next, to 14 bits.
    #[target_feature(enable = "avx512f,avx512bw")]
    #[inline]
    fn row(&self, r: usize, rounded: bool) -> std::arch::x86_64::__m512 {
        use std::arch::x86_64::*;
        let [mut gate, mut up] = [0, 1].map(|half| {
            let scales = self.scales.map(|s| (s.rows[r], &s.columns[half * SIDE..]));
            let mut row = [0.0; SIDE];
            // SAFETY: 16 floats.
            unsafe { _mm512_storeu_ps(row.as_mut_ptr(), worth(&self.sums[half][r], scales)) };
            row
        });
        if let Some((gate_bias, up_bias)) = self.bias {
            gate.iter_mut().zip(gate_bias).for_each(|(v, b)| *v += b);
            up.iter_mut().zip(up_bias).for_each(|(v, b)| *v += b);
        }
        let up = |gate: __m512| {
            // SAFETY: 16 floats.
            _mm512_mul_ps(gate, unsafe { _mm512_loadu_ps(up.as_ptr()) })
        };
        if rounded && self.activation == Activation::Silu {
            // SAFETY: 16 floats.
            let gate = unsafe { _mm512_loadu_ps(gate.as_ptr()) };
            let power = power_of_two(_mm512_mul_ps(gate, _mm512_set1_ps(-std::f32::consts::LOG2_E)));
            return up(_mm512_mul_ps(gate, _mm512_rcp14_ps(_mm512_add_ps(power, _mm512_set1_ps(1.0)))));
        }
        self.activation.apply::<true>(&mut gate);
        // SAFETY: 16 floats.
        up(unsafe { _mm512_loadu_ps(gate.as_ptr()) })
    }

    /// Splits the block into the tiles of the next product, from column `at` on.
    #[target_feature(enable = "avx512f,avx512bw")]
    fn split(&self, tiles: &mut [TileData], at: usize) {
        use std::arch::x86_64::*;
        for r in 0..SIDE {
            let mut rest = self.row(r, tiles.len() == 1);
            for tile in tiles.iter_mut() {
                let part = round(rest);
                let words = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(_mm512_castps_si512(part)));
                // SAFETY: 16 words from column `at` of row `r` on.
                unsafe { _mm256_storeu_si256(tile.0[r * DEPTH + at..][..SIDE].as_mut_ptr().cast(), words) };
                rest = _mm512_sub_ps(rest, part);
            }
        }
    }
}

/// Writes or adds sums, or what there is of `rows` and `columns` if less, to rows that are `stride` floats apart.
#[target_feature(enable = "avx512f")]
fn store_sums(sums: &Sums, scales: Option<Scales<'_>>, rows: usize, columns: usize, out: &mut [f32], stride: usize, store: Store) {
    use std::arch::x86_64::*;
    let columns = columns.min(2 * SIDE);
    for r in 0..rows.min(2 * SIDE) {
        let line = &mut out[r * stride..][..columns];
        for half in 0..columns.div_ceil(SIDE) {
            let mask = ((1_u32 << (columns - half * SIDE).min(SIDE)) - 1) as __mmask16;
            let at = line.as_mut_ptr().wrapping_add(half * SIDE);
            // SAFETY: the mask keeps loads and stores inside the line; a row of a tile is 16 floats.
            unsafe {
                let scales = scales.map(|s| (s.rows[r], &s.columns[half * SIDE..]));
                let mut value = worth(&sums.0[r / SIDE * 2 + half][r % SIDE], scales);
                if store == Store::Add {
                    value = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, at), value);
                }
                _mm512_mask_storeu_ps(at, mask, value);
            }
        }
    }
}

/// Multiplies two blocks of rows by two blocks of columns over all steps of k given; `more` adds to the sums there are. Meanwhile fetches the tiles
/// `ahead` into the second-level cache.
fn multiply_blocks<const X: usize, const W: usize, const INT: bool>(
    a0: &[TileData],
    a1: &[TileData],
    b: &[TileData],
    more: bool,
    ahead: &[TileData],
    sums: &mut Sums,
) {
    assert!(a0.len() == a1.len() && a0.len().is_multiple_of(X) && b.len() == a0.len() / X * 2 * W, "tiles do not fit");
    let mut lines = ahead.iter().flat_map(|t| t.0.as_chunks::<DEPTH>().0);
    let each = (ahead.len() * SIDE).div_ceil(a0.len() / X);
    let sums = (&raw mut *sums).cast::<f32>();
    // SAFETY: tile registers are configured, `with_tiles`; every load of a product reads whole tiles of the slices (part p of
    // a step is tile p of `a`, tiles 2p and 2p + 1 of `b`); the sums are four tiles.
    unsafe {
        if more {
            asm!(
                "tileloadd tmm0, [{c} + {s}*1]",
                "tileloadd tmm1, [{c} + {s}*1 + 1024]",
                "tileloadd tmm2, [{c} + {s}*1 + 2048]",
                "tileloadd tmm3, [{c} + {s}*1 + 3072]",
                c = in(reg) sums,
                s = in(reg) 64_usize,
                options(nostack, readonly),
            );
        } else {
            asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem));
        }
        for ((a0, a1), b) in a0.chunks_exact(X).zip(a1.chunks_exact(X)).zip(b.chunks_exact(2 * W)) {
            for line in lines.by_ref().take(each) {
                _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast());
            }
            // Keeps the units of wide multiply-adds awake: left alone for half a microsecond they are switched off, and the first store of a tile or
            // multiply-add after that waits for a quarter of one.
            asm!("vpxord zmm31, zmm31, zmm31", "vfmadd231ps zmm31, zmm31, zmm31", out("zmm31") _, options(nostack, nomem, preserves_flags));
            macro_rules! tiles {
                ($($line:literal),*) => { tiles!("tdpbf16ps"; $($line),*) };
                ($multiply:literal; $($line:literal),*) => {
                    asm!(
                        $($line,)*
                        concat!($multiply, " tmm0, tmm4, tmm6"),
                        concat!($multiply, " tmm1, tmm4, tmm7"),
                        concat!($multiply, " tmm2, tmm5, tmm6"),
                        concat!($multiply, " tmm3, tmm5, tmm7"),
                        "/* {a0} {a1} {b} {s} */",
                        a0 = in(reg) a0.as_ptr(),
                        a1 = in(reg) a1.as_ptr(),
                        b = in(reg) b.as_ptr(),
                        s = in(reg) 64_usize,
                        options(nostack, readonly),
                    )
                };
            }
            macro_rules! once {
                ($multiply:literal) => {
                    tiles!(
                        $multiply;
                        "tileloadd tmm6, [{b} + {s}*1]",
                        "tileloadd tmm7, [{b} + {s}*1 + 1024]",
                        "tileloaddt1 tmm4, [{a0} + {s}*1]",
                        "tileloaddt1 tmm5, [{a1} + {s}*1]"
                    )
                };
            }
            if INT {
                once!("tdpbssd");
                continue;
            }
            if X == 1 {
                once!("tdpbf16ps");
                continue;
            }
            // Partial products 11, 12, 22, 21, 31, 13; of two parts each, 11, 12, 21.
            tiles!(
                "tileloadd tmm6, [{b} + {s}*1]",
                "tileloadd tmm7, [{b} + {s}*1 + 1024]",
                "tileloadd tmm4, [{a0} + {s}*1]",
                "tileloadd tmm5, [{a1} + {s}*1]"
            );
            if W >= 2 {
                tiles!("tileloadd tmm6, [{b} + {s}*1 + 2048]", "tileloadd tmm7, [{b} + {s}*1 + 3072]");
            }
            if X == 2 {
                tiles!(
                    "tileloadd tmm4, [{a0} + {s}*1 + 1024]",
                    "tileloadd tmm5, [{a1} + {s}*1 + 1024]",
                    "tileloadd tmm6, [{b} + {s}*1]",
                    "tileloadd tmm7, [{b} + {s}*1 + 1024]"
                );
                continue;
            }
            tiles!("tileloadd tmm4, [{a0} + {s}*1 + 1024]", "tileloadd tmm5, [{a1} + {s}*1 + 1024]");
            if W >= 2 {
                tiles!("tileloadd tmm6, [{b} + {s}*1]", "tileloadd tmm7, [{b} + {s}*1 + 1024]");
            }
            tiles!("tileloadd tmm4, [{a0} + {s}*1 + 2048]", "tileloadd tmm5, [{a1} + {s}*1 + 2048]");
            if W >= 3 {
                tiles!(
                    "tileloadd tmm4, [{a0} + {s}*1]",
                    "tileloadd tmm5, [{a1} + {s}*1]",
                    "tileloadd tmm6, [{b} + {s}*1 + 4096]",
                    "tileloadd tmm7, [{b} + {s}*1 + 5120]"
                );
            }
        }
        asm!(
            "tilestored [{c} + {s}*1], tmm0",
            "tilestored [{c} + {s}*1 + 1024], tmm1",
            "tilestored [{c} + {s}*1 + 2048], tmm2",
            "tilestored [{c} + {s}*1 + 3072], tmm3",
            c = in(reg) sums,
            s = in(reg) 64_usize,
            options(nostack),
        );
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn products_are_as_exact_as_f32_on_ragged_shapes(m in 1usize..70, n in 1usize..80, k in 1usize..200, seed in 0u64..1000) {
            if !available() {
                return Ok(());
            }
            let (x, w) = (super::super::kernels::floats(m * k, seed), super::super::kernels::floats(n * k, seed + 1));
            for precision in [Precision::F32, Precision::Bf16] {
                let weights = Weights::pack(precision, k, n, &super::super::of(k, &w));
                let rows = Rows { data: &x, rows: m, width: k, stride: k };
                let mut scratch = Scratch::default();
                let mut out = vec![1.0_f32; m * n];
                product(rows, &weights, &mut scratch, &mut out, Store::Add);
                let value = |v: f32| f64::from(if precision == Precision::Bf16 { half::bf16::from_f32(v).to_f32() } else { v });
                for r in 0..m {
                    for c in 0..n {
                        let term = |i: usize| value(x[r * k + i]) * value(w[c * k + i]);
                        let exact: f64 = (0..k).map(term).sum();
                        // Six partial products a term, each rounded once.
                        let size: f64 = (0..k).map(|i| term(i).abs()).sum::<f64>() + 1.0;
                        prop_assert!((f64::from(out[r * n + c]) - 1.0 - exact).abs() < 2e-7 * size * ((6 * k) as f64).sqrt());
                    }
                }
                // A row alone has the bits it has among others.
                let mut alone = vec![1.0_f32; n];
                product(Rows { data: &x[(m - 1) * k..], rows: 1, ..rows }, &weights, &mut scratch, &mut alone, Store::Add);
                prop_assert_eq!(&alone[..], &out[(m - 1) * n..]);
            }
        }
    }
}
