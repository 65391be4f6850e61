//! f32 products on the tile unit of newer x86 processors (AMX), which multiplies bf16 numbers only.
//!
//! A float is the sum of three bf16 numbers, 8 bits of its mantissa each: x = x1 + x2 + x3 exactly. Of the nine partial products of two
//! floats the six largest are computed, exactly, and added up in f32; the three left out are below 2^-24 of the product. So the result
//! is as close to the true one as that of ordinary f32 arithmetic, at more than twice its speed. Rows go through one fixed sequence of
//! operations each, so that their bits do not depend on their neighbours.
#![allow(unsafe_code)]

use std::arch::asm;
use std::arch::x86_64::{__cpuid, __cpuid_count, _MM_HINT_T1, _mm_prefetch};
use std::sync::OnceLock;

use super::kernels::{Isa, Rows, Store, split_parts};

/// Rows and columns of a tile.
const SIDE: usize = 16;
/// Steps of k in a tile.
const DEPTH: usize = 32;
/// bf16 numbers of a tile.
const TILE: usize = SIDE * DEPTH;
/// Steps of k that are multiplied before the next rows: two columns' weights, 108 KiB, and all rows, 972 KiB, stay in the second-level cache meanwhile.
const SLICE: usize = 18;
/// bf16 parts of a float.
const PARTS: usize = 3;

/// Whether this process may use the tile unit. Asks the system for leave the first time.
pub(super) fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| {
        const AMX_BF16: u32 = 1 << 22;
        const AMX_TILE: u32 = 1 << 24;
        let leaf = __cpuid(0).eax;
        let has = leaf >= 7 && __cpuid_count(7, 0).edx & (AMX_BF16 | AMX_TILE) == AMX_BF16 | AMX_TILE;
        has && cfg!(target_os = "linux") && Isa::best() == Isa::Avx512 && permitted()
    })
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

/// Bf16 tiles, each on a cache line boundary.
#[derive(Debug, Clone, Default)]
pub(super) struct Tiles(Vec<TileData>);

#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct TileData([u16; TILE]);

impl Tiles {
    fn reserve(&mut self, tiles: usize) {
        if self.0.len() < tiles {
            self.0.resize(tiles, TileData([0; TILE]));
        }
    }
}

/// Weights in tiles: for each pair of column blocks, each step of k, the three parts of both blocks.
#[derive(Debug, Clone)]
pub(super) struct Weights {
    tiles: Tiles,
    k: usize,
    n: usize,
}

impl Weights {
    /// Packs rows of `k` weights, `n` of them.
    pub(super) fn pack<'a>(k: usize, n: usize, rows: impl Iterator<Item = &'a [f32]>) -> Self {
        let steps = k.div_ceil(DEPTH);
        let pairs = n.div_ceil(2 * SIDE);
        let mut tiles = Tiles::default();
        tiles.reserve(pairs * steps * PARTS * 2);
        let mut parts = vec![0_u16; k * PARTS];
        for (column, row) in rows.enumerate() {
            split_parts(Isa::best(), row, &mut parts);
            let (pair, block, within) = (column / (2 * SIDE), column / SIDE % 2, column % SIDE);
            for part in 0..PARTS {
                for (i, value) in parts[part * k..(part + 1) * k].iter().enumerate() {
                    let tile = ((pair * steps + i / DEPTH) * PARTS + part) * 2 + block;
                    // Pairs of k lie side by side.
                    tiles.0[tile].0[(i % DEPTH / 2) * DEPTH + within * 2 + i % 2] = *value;
                }
            }
        }
        Self { tiles, k, n }
    }
}

/// Buffers of [`product`].
#[derive(Debug, Default)]
pub(super) struct Scratch {
    tiles: Tiles,
    parts: Vec<u16>,
}

/// Splits rows into tiles: for each block of 16 rows and each step of k, the three parts.
fn pack_rows(x: Rows<'_>, scratch: &mut Scratch) {
    let steps = x.width.div_ceil(DEPTH);
    scratch.tiles.reserve(x.rows.div_ceil(SIDE) * steps * PARTS);
    scratch.parts.resize(x.width * PARTS, 0);
    for row in 0..x.rows.next_multiple_of(SIDE) {
        if row < x.rows {
            split_parts(Isa::best(), &x.data[row * x.stride..][..x.width], &mut scratch.parts);
        } else {
            scratch.parts.fill(0);
        }
        for part in 0..PARTS {
            for (step, values) in scratch.parts[part * x.width..(part + 1) * x.width].chunks(DEPTH).enumerate() {
                let tile = ((row / SIDE) * steps + step) * PARTS + part;
                let out = &mut scratch.tiles.0[tile].0.as_chunks_mut::<DEPTH>().0[row % SIDE];
                if let Ok(values) = <&[u16; DEPTH]>::try_from(values) {
                    *out = *values;
                } else {
                    out[..values.len()].copy_from_slice(values);
                    out[values.len()..].fill(0);
                }
            }
        }
    }
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

/// `out = x * weights` (or `out += ...`). Must only be called where [`available`].
///
/// Panics if a slice is shorter than its shape says, which is a mistake of the caller in this module tree.
pub(super) fn product(x: Rows<'_>, weights: &Weights, scratch: &mut Scratch, out: &mut [f32], store: Store) {
    assert!(available() && x.width == weights.k && out.len() >= x.rows * weights.n, "shapes of the product do not fit");
    pack_rows(x, scratch);
    let n = weights.n;
    let steps = x.width.div_ceil(DEPTH);
    let blocks = x.rows.div_ceil(SIDE);
    let pairs = n.div_ceil(2 * SIDE);
    // SAFETY: the tile unit may be used (`available`), and CONFIG is a valid configuration.
    unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const CONFIG, options(nostack, readonly)) };
    for slice in (0..steps).step_by(SLICE) {
        let end = steps.min(slice + SLICE);
        let fresh = slice == 0 && store == Store::Set;
        let tiles_of = |pair: usize| &weights.tiles.0[(pair * steps + slice) * PARTS * 2..(pair * steps + end) * PARTS * 2];
        for pair in 0..pairs {
            let b = tiles_of(pair);
            // The weights of the next columns come from the third-level cache or from memory: while these are used, a share of them
            // is fetched with every pair of row blocks.
            let next = tiles_of((pair + 1).min(pairs - 1));
            let share = next.len().div_ceil(blocks.div_ceil(2));
            let column = pair * 2 * SIDE;
            for first in (0..blocks).step_by(2) {
                // Where there is no second block, the first is multiplied twice.
                let second = (first + 1).min(blocks - 1);
                let ahead = next.get(first / 2 * share..).unwrap_or_default();
                let ahead = &ahead[..share.min(ahead.len())];
                let tiles = |block: usize| &scratch.tiles.0[(block * steps + slice) * PARTS..(block * steps + end) * PARTS];
                let (rows, columns) = ((x.rows - first * SIDE).min(2 * SIDE), (n - column).min(2 * SIDE));
                let target = &mut out[first * SIDE * n + column..];
                if rows == 2 * SIDE && columns == 2 * SIDE {
                    multiply(tiles(first), tiles(second), b, ahead, target, n, fresh);
                    continue;
                }
                let mut whole = [0.0_f32; 4 * SIDE * SIDE];
                for (r, line) in whole.as_chunks_mut::<{ 2 * SIDE }>().0.iter_mut().take(rows).enumerate() {
                    line[..columns].copy_from_slice(&target[r * n..][..columns]);
                }
                multiply(tiles(first), tiles(second), b, ahead, &mut whole, 2 * SIDE, fresh);
                for (r, line) in whole.as_chunks::<{ 2 * SIDE }>().0.iter().take(rows).enumerate() {
                    target[r * n..][..columns].copy_from_slice(&line[..columns]);
                }
            }
        }
    }
    // SAFETY: as above.
    unsafe { asm!("tilerelease", options(nostack, nomem)) };
}

/// Adds two blocks of rows times two blocks of columns over some steps of k to 32 x 32 floats whose rows are `stride` apart, or to
/// nothing if `fresh`.
fn multiply(a0: &[TileData], a1: &[TileData], b: &[TileData], ahead: &[TileData], out: &mut [f32], stride: usize, fresh: bool) {
    assert!(a0.len() == a1.len() && b.len() == 2 * a0.len() && a0.len().is_multiple_of(PARTS), "tiles do not fit");
    assert!(out.len() >= (2 * SIDE - 1) * stride + 2 * SIDE, "output is shorter than 32 rows");
    let mut lines = ahead.iter().flat_map(|t| t.0.as_chunks::<DEPTH>().0);
    let each = (ahead.len() * SIDE).div_ceil(a0.len() / PARTS);
    let lower = out.as_mut_ptr().wrapping_add(SIDE * stride);
    let upper = out.as_mut_ptr();
    // SAFETY: tile registers are configured by the caller, `product`; every load of a product reads whole tiles of the slices (part p of
    // a step is tile p of `a`, tiles 2p and 2p + 1 of `b`); the output is read and written in four blocks of 16 rows of 64 bytes, all
    // of which lie in `out` by the assertion.
    unsafe {
        if fresh {
            asm!("tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3", options(nostack, nomem));
        } else {
            asm!(
                "tileloadd tmm0, [{u} + {s}*1]",
                "tileloadd tmm1, [{u} + {s}*1 + 64]",
                "tileloadd tmm2, [{l} + {s}*1]",
                "tileloadd tmm3, [{l} + {s}*1 + 64]",
                u = in(reg) upper,
                l = in(reg) lower,
                s = in(reg) stride * 4,
                options(nostack, readonly),
            );
        }
        for ((a0, a1), b) in a0.chunks_exact(PARTS).zip(a1.chunks_exact(PARTS)).zip(b.chunks_exact(2 * PARTS)) {
            for line in lines.by_ref().take(each) {
                _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast());
            }
            // Products 11, 12, 22, 21, 31, 13: each needs one pair of tiles that the one before did not have.
            asm!(
                "tileloadd tmm4, [{a0} + {s}*1]",
                "tileloadd tmm6, [{b} + {s}*1]",
                "tileloadd tmm7, [{b} + {s}*1 + 1024]",
                "tileloadd tmm5, [{a1} + {s}*1]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "tileloadd tmm6, [{b} + {s}*1 + 2048]",
                "tileloadd tmm7, [{b} + {s}*1 + 3072]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "tileloadd tmm4, [{a0} + {s}*1 + 1024]",
                "tileloadd tmm5, [{a1} + {s}*1 + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "tileloadd tmm6, [{b} + {s}*1]",
                "tileloadd tmm7, [{b} + {s}*1 + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "tileloadd tmm4, [{a0} + {s}*1 + 2048]",
                "tileloadd tmm5, [{a1} + {s}*1 + 2048]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "tileloadd tmm4, [{a0} + {s}*1]",
                "tileloadd tmm5, [{a1} + {s}*1]",
                "tileloadd tmm6, [{b} + {s}*1 + 4096]",
                "tileloadd tmm7, [{b} + {s}*1 + 5120]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                a0 = in(reg) a0.as_ptr(),
                a1 = in(reg) a1.as_ptr(),
                b = in(reg) b.as_ptr(),
                s = in(reg) 64_usize,
                options(nostack, readonly),
            );
        }
        asm!(
            "tilestored [{u} + {s}*1], tmm0",
            "tilestored [{u} + {s}*1 + 64], tmm1",
            "tilestored [{l} + {s}*1], tmm2",
            "tilestored [{l} + {s}*1 + 64], tmm3",
            u = in(reg) upper,
            l = in(reg) lower,
            s = in(reg) stride * 4,
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
            let weights = Weights::pack(k, n, w.chunks_exact(k));
            let rows = Rows { data: &x, rows: m, width: k, stride: k };
            let mut scratch = Scratch::default();
            let mut out = vec![1.0_f32; m * n];
            product(rows, &weights, &mut scratch, &mut out, Store::Add);
            for r in 0..m {
                for c in 0..n {
                    let term = |i: usize| f64::from(x[r * k + i]) * f64::from(w[c * k + i]);
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
