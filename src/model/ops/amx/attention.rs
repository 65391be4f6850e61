//! Attention within one sequence on the tile unit: everything is multiplied as the sum of two bf16 numbers, 16 bits of a float's 24, and sums and the
//! softmax are f32. One bf16 number is not enough: it moves a fortieth of the cuts, several times as many as rounding the products around it does.
//!
//! Keys and values lie in tiles of 32 tokens that begin at multiples of 32, whatever a query sees of them, so that a row has the same bits in any sequence.

use std::arch::x86_64::*;
use std::ops::Range;

use super::{DEPTH, SIDE, Sums, TileData, multiply_blocks, next_part, odd_words, pack_rows, round, with_tiles};
use crate::model::ops::attention::AttentionShape;
use crate::model::ops::kernels::{Rows, power_of_two};
use crate::model::ops::memory::Block;

/// bf16 numbers that a number is the sum of.
const PARTS: usize = 2;
/// Queries that are attended at once.
const QUERIES: usize = 2 * SIDE;

/// Buffers of [`attention`].
#[derive(Debug, Default)]
pub(in crate::model::ops) struct AttentionScratch {
    keys: Block<TileData>,
    values: Block<TileData>,
    queries: Block<TileData>,
    /// Scores of the queries with 32 keys each.
    scores: Block<Sums>,
    /// Their exponentials.
    weights: Block<TileData>,
}

/// As [`attention`](crate::model::ops::attention()), for a causal sequence. Must only be called where the tile unit is [`available`](super::available).
///
/// Panics if a slice is shorter than its shape says, which is a mistake of the caller in this module tree.
pub(in crate::model::ops) fn attention(shape: AttentionShape, past: &[f32], qkv: &[f32], out: &mut [f32], scratch: &mut AttentionScratch) {
    // SAFETY: where tiles are used, the processor has these instructions.
    with_tiles(|| unsafe { attend(shape, past, qkv, out, scratch) });
}

#[target_feature(enable = "avx512f,avx512bw")]
fn attend(shape: AttentionShape, past: &[f32], qkv: &[f32], out: &mut [f32], scratch: &mut AttentionScratch) {
    let AttentionShape { heads, kv_heads, head_dim, scale, window, .. } = shape;
    let (row, group, width) = (shape.qkv(), heads / kv_heads, heads * head_dim);
    let before_all = past.len() / shape.kv();
    let tokens = before_all + qkv.len() / row;
    let (depth, all, pairs) = (head_dim.div_ceil(DEPTH), tokens.div_ceil(DEPTH), head_dim.div_ceil(2 * SIDE));
    let AttentionScratch { keys, values, queries, scores, weights } = scratch;
    keys.reserve(all * 2 * depth * PARTS);
    values.reserve(all * 2 * pairs * PARTS);
    // Keys and values of a token.
    let kept = |t: usize| match t.checked_sub(before_all) {
        None => &past[t * shape.kv()..][..shape.kv()],
        Some(t) => &qkv[t * row + width..][..shape.kv()],
    };
    for kv in 0..kv_heads {
        let part = |from: usize| move |t: usize| (t < tokens).then(|| &kept(t)[(from + kv) * head_dim..][..head_dim]);
        pack_keys(tokens, part(0), keys, depth);
        pack_values(all, part(kv_heads), values, pairs);
        for head in kv * group..(kv + 1) * group {
            for first in (before_all..tokens).step_by(QUERIES) {
                let rows = QUERIES.min(tokens - first);
                let before = |query: usize| window.map_or(0, |window| (query + 1).saturating_sub(window));
                let steps = before(first) / DEPTH..(first + rows).div_ceil(DEPTH);
                scores.reserve(steps.len());
                weights.reserve(2 * steps.len() * PARTS);
                let data = &qkv[(first - before_all) * row + head * head_dim..];
                pack_rows(Rows { data, rows, width: head_dim, stride: row }, PARTS, queries);
                // Where there is no second block, the first is multiplied twice.
                let second = (rows - 1) / SIDE;
                let each = depth * PARTS;
                let (a0, a1) = (&queries[..each], &queries[second * each..][..each]);
                for (step, scores) in steps.clone().zip(scores.iter_mut()) {
                    multiply_blocks::<PARTS, PARTS, false>(a0, a1, &keys[step * 2 * each..][..2 * each], false, &[], scores);
                }
                let mut inverse = [0.0; QUERIES];
                for (r, inverse) in inverse.iter_mut().enumerate().take(rows) {
                    let sees = before(first + r)..first + r + 1;
                    let weights = &mut weights[r / SIDE * steps.len() * PARTS..][..steps.len() * PARTS];
                    *inverse = 1.0 / exponentials(&scores[..steps.len()], r, steps.start * DEPTH, sees, scale, weights);
                }
                let each = steps.len() * PARTS;
                let (a0, a1) = (&weights[..each], &weights[second * each..][..each]);
                for pair in 0..pairs {
                    let mut sums = Sums::ZERO;
                    let values = &values[(pair * all + steps.start) * 2 * PARTS..][..2 * each];
                    multiply_blocks::<PARTS, PARTS, false>(a0, a1, values, false, &[], &mut sums);
                    let columns = (head_dim - pair * 2 * SIDE).min(2 * SIDE);
                    for (r, inverse) in inverse.iter().enumerate().take(rows) {
                        let line = &mut out[(first - before_all + r) * width + head * head_dim + pair * 2 * SIDE..][..columns];
                        for (half, line) in line.chunks_mut(SIDE).enumerate() {
                            for (out, sum) in line.iter_mut().zip(&sums.0[r / SIDE * 2 + half][r % SIDE]) {
                                *out = sum * inverse;
                            }
                        }
                    }
                }
            }
        }
    }
}

/// The lanes of `from..to` in a register that begins at `at`.
fn lanes(range: &Range<usize>, at: usize) -> __mmask16 {
    let below = |end: usize| ((1_u32 << end.saturating_sub(at).min(SIDE)) - 1) as __mmask16;
    below(range.end) & !below(range.start)
}

/// Writes `e^(scale * (score - largest))` of query `r` for the keys that it sees into its row of the tiles, and 0 for all others; returns their sum. The
/// scores begin at key `start`.
#[target_feature(enable = "avx512f,avx512bw")]
fn exponentials(scores: &[Sums], r: usize, start: usize, sees: Range<usize>, scale: f32, tiles: &mut [TileData]) -> f32 {
    let odd = odd_words();
    let halves = |scores: &Sums, step: usize| {
        [0, 1].map(|half| {
            let mask = lanes(&sees, start + step * DEPTH + half * SIDE);
            // SAFETY: 16 floats.
            (mask, unsafe { _mm512_loadu_ps(scores.0[r / SIDE * 2 + half][r % SIDE].as_ptr()) })
        })
    };
    let mut top = _mm512_set1_ps(f32::NEG_INFINITY);
    for (step, scores) in scores.iter().enumerate() {
        for (mask, v) in halves(scores, step) {
            top = _mm512_mask_max_ps(top, mask, top, v);
        }
    }
    let (top, scale) = (_mm512_set1_ps(_mm512_reduce_max_ps(top)), _mm512_set1_ps(scale * std::f32::consts::LOG2_E));
    let mut sum = _mm512_setzero_ps();
    for ((step, scores), tiles) in scores.iter().enumerate().zip(tiles.as_chunks_mut::<PARTS>().0) {
        let parts = halves(scores, step).map(|(mask, v)| {
            let power = power_of_two(_mm512_mul_ps(_mm512_sub_ps(v, top), scale));
            _mm512_maskz_mov_ps(mask, power)
        });
        sum = _mm512_add_ps(sum, _mm512_add_ps(parts[0], parts[1]));
        let mut rest = parts;
        for tile in tiles {
            let words = next_part(&mut rest, odd);
            // SAFETY: row `r` of a tile is 64 bytes.
            unsafe { _mm512_store_si512(tile.0[r % SIDE * DEPTH..][..DEPTH].as_mut_ptr().cast(), words) };
        }
    }
    _mm512_reduce_add_ps(sum)
}

/// A row's numbers from `at` on, up to 16.
#[target_feature(enable = "avx512f")]
#[inline]
fn sixteen(row: &[f32], at: usize) -> __m512 {
    let mask = ((1_u32 << row.len().saturating_sub(at).min(SIDE)) - 1) as __mmask16;
    // SAFETY: the mask keeps the load inside the row.
    unsafe { _mm512_maskz_loadu_ps(mask, row.as_ptr().wrapping_add(at)) }
}

/// Keys as columns: for each pair of blocks of 16 keys, each step along a head, both parts of both blocks.
#[target_feature(enable = "avx512f,avx512bw")]
fn pack_keys<'a>(tokens: usize, row: impl Fn(usize) -> Option<&'a [f32]>, tiles: &mut [TileData], depth: usize) {
    let odd = odd_words();
    let lines = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0), _mm512_set1_epi32(SIDE as i32));
    for (t, row) in (0..tokens).map_while(|t| Some((t, row(t)?))) {
        for step in 0..depth {
            let mut rest = [0, SIDE].map(|half| sixteen(row, step * DEPTH + half));
            let tiles = &mut tiles[(t / DEPTH * depth + step) * 2 * PARTS..][..2 * PARTS];
            for tile in tiles[t / SIDE % 2..].iter_mut().step_by(2) {
                let words = next_part(&mut rest, odd);
                let column = tile.0.as_mut_ptr().cast::<i32>().wrapping_add(t % SIDE);
                // SAFETY: word `t % 16` of each of the 16 lines of a tile.
                unsafe { _mm512_i32scatter_epi32::<4>(column, lines, words) };
            }
        }
    }
}

/// Values as rows: for each pair of blocks of 16 numbers of a head, each step of 32 tokens, both parts of both blocks. Tokens that are not there are zeros.
#[target_feature(enable = "avx512f,avx512bw")]
fn pack_values<'a>(steps: usize, row: impl Fn(usize) -> Option<&'a [f32]>, tiles: &mut [TileData], pairs: usize) {
    for step in 0..steps {
        for line in 0..SIDE {
            let token = step * DEPTH + 2 * line;
            let rows = [token, token + 1].map(|t| row(t).unwrap_or_default());
            for block in 0..2 * pairs {
                let mut rest = rows.map(|row| sixteen(row, block * SIDE));
                let tiles = &mut tiles[(block / 2 * steps + step) * 2 * PARTS..][..2 * PARTS];
                for tile in tiles[block % 2..].iter_mut().step_by(2) {
                    let [first, second] = [round(rest[0]), round(rest[1])];
                    let words = _mm512_or_si512(_mm512_srli_epi32::<16>(_mm512_castps_si512(first)), _mm512_castps_si512(second));
                    // SAFETY: a line of a tile is 64 bytes.
                    unsafe { _mm512_store_si512(tile.0[line * DEPTH..][..DEPTH].as_mut_ptr().cast(), words) };
                    rest = [_mm512_sub_ps(rest[0], first), _mm512_sub_ps(rest[1], second)];
                }
            }
        }
    }
}
