//! Kernels with run-time dispatch: AVX-512, AVX2 with FMA, or portable code.
//!
//! Every kernel works row by row: an output row is one fixed sequence of operations on its own input
//! row, so it has the same bits whatever rows stand beside it. Products accumulate over k in order, one fused multiply-add a step, so
//! that AVX-512, AVX2 and portable code on a processor with fused multiply-add give the same bits too.
#![allow(unsafe_code)]

use std::sync::OnceLock;

use super::memory::Block;

/// Columns of one packed panel of weights. Nine rows of three AVX-512 registers each leave room for three of the panel and one of the
/// input, and need 12 loads for 27 multiply-adds.
pub(super) const PANEL: usize = 48;

/// Rows of one packed block of input.
pub(super) const BLOCK: usize = 9;

/// How many steps of k ahead a panel is fetched: weights come from the third-level cache or from memory.
#[cfg(target_arch = "x86_64")]
const PREFETCH: usize = 8;

/// Instruction set in use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Isa {
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    Portable,
}

impl Isa {
    /// Every instruction set this processor can run.
    pub(crate) fn available() -> Vec<Self> {
        let mut all = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            let fma = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
            if fma && is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512bw") {
                all.push(Self::Avx512);
            }
            if fma {
                all.push(Self::Avx2);
            }
        }
        all.push(Self::Portable);
        all
    }

    /// The fastest of [`Self::available`].
    pub(crate) fn best() -> Self {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| Self::available()[0])
    }
}

/// What becomes of a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Store {
    /// Written over the output.
    Set,
    /// Added to the output.
    Add,
}

/// Rows of a matrix in memory, `stride` floats apart.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rows<'a> {
    pub(super) data: &'a [f32],
    pub(super) rows: usize,
    pub(super) width: usize,
    pub(super) stride: usize,
}

impl Rows<'_> {
    fn check(&self) {
        assert!(self.rows == 0 || self.data.len() >= (self.rows - 1) * self.stride + self.width, "input is shorter than its view");
    }
}

/// Packs rows into blocks of [`BLOCK`] (the last may be shorter), each block column by column, so that a tile reads them in a line.
pub(super) fn pack_rows(x: Rows<'_>, packed: &mut Block<f32>) {
    x.check();
    packed.reserve(x.rows * x.width);
    for first in (0..x.rows).step_by(BLOCK) {
        let rows = BLOCK.min(x.rows - first);
        let block = &mut packed[first * x.width..(first + rows) * x.width];
        for r in 0..rows {
            let source = &x.data[(first + r) * x.stride..][..x.width];
            for (column, value) in block.chunks_exact_mut(rows).zip(source) {
                column[r] = *value;
            }
        }
    }
}

/// Where a product takes its rows from.
#[derive(Debug, Clone, Copy)]
pub(super) enum Input<'a> {
    /// Rows as they lie.
    Plain(Rows<'a>),
    /// Rows packed by [`pack_rows`].
    Packed { data: &'a [f32], rows: usize, width: usize },
}

/// `out = x * panels` (or `out += ...`): x is `rows x k`, the panels hold a `k x n` matrix as ceil(n / 48) blocks of `k x 48` floats.
///
/// Panics if a slice is shorter than its view says, which is a mistake of the caller in this module tree.
pub(super) fn product(isa: Isa, input: Input<'_>, panels: &[f32], n: usize, out: &mut [f32], out_stride: usize, store: Store) {
    let (data, rows, k) = match input {
        Input::Plain(x) => {
            x.check();
            (x.data, x.rows, x.width)
        }
        Input::Packed { data, rows, width } => {
            assert!(data.len() >= rows * width, "packed input is shorter than its rows");
            (data, rows, width)
        }
    };
    if rows == 0 || n == 0 {
        return;
    }
    assert!(panels.len() >= n.div_ceil(PANEL) * PANEL * k, "panels are shorter than k x n");
    assert!(out.len() >= (rows - 1) * out_stride + n, "output is shorter than rows x n");
    for (p, panel) in panels.chunks_exact(PANEL * k.max(1)).take(n.div_ceil(PANEL)).enumerate() {
        let columns = (n - p * PANEL).min(PANEL);
        for first in (0..rows).step_by(BLOCK) {
            let count = BLOCK.min(rows - first);
            // SAFETY: `first + count <= rows`, so with the assertions above every pointer that a tile computes (rows of x at their
            // stride or packed, rows of the output at `out_stride`, k x 48 floats of the panel) lies inside its slice; prefetches may
            // point anywhere; the instruction set was detected on this processor.
            unsafe {
                let (x, row_step, k_step) = match input {
                    Input::Plain(x) => (data.as_ptr().add(first * x.stride), x.stride, 1),
                    Input::Packed { .. } => (data.as_ptr().add(first * k), 1, count),
                };
                let out = out.as_mut_ptr().add(first * out_stride + p * PANEL);
                let tile = Tile { x, row_step, k_step, k, panel: panel.as_ptr(), out, out_stride, columns, store };
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 => tile.avx512(count, matches!(input, Input::Packed { .. })),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => tile.avx2(count),
                    Isa::Portable => tile.portable(count),
                }
            }
        }
    }
}

/// A few rows of the input times one panel.
struct Tile {
    x: *const f32,
    /// Floats between rows of x, and between columns.
    row_step: usize,
    k_step: usize,
    k: usize,
    panel: *const f32,
    out: *mut f32,
    out_stride: usize,
    columns: usize,
    store: Store,
}

macro_rules! by_rows {
    ($self:ident, $f:ident, $rows:expr, $c:literal, $packed:literal, $($r:literal)+) => {
        match $rows {
            $($r => $self.$f::<$r, $c, $packed>(),)+
            _ => unreachable!("a tile has at most a block of rows"),
        }
    };
}

impl Tile {
    /// # Safety
    /// The pointers must be valid for `rows` rows, and the processor must have AVX-512F. `packed` rows must lie column by column.
    #[cfg(target_arch = "x86_64")]
    unsafe fn avx512(&self, rows: usize, packed: bool) {
        // SAFETY: passed on to the caller.
        unsafe {
            match (self.columns.div_ceil(16), packed) {
                (1, true) => by_rows!(self, avx512_rows, rows, 1, true, 1 2 3 4 5 6 7 8 9),
                (2, true) => by_rows!(self, avx512_rows, rows, 2, true, 1 2 3 4 5 6 7 8 9),
                (_, true) => by_rows!(self, avx512_rows, rows, 3, true, 1 2 3 4 5 6 7 8 9),
                (1, false) => by_rows!(self, avx512_rows, rows, 1, false, 1 2 3 4 5 6 7 8 9),
                (2, false) => by_rows!(self, avx512_rows, rows, 2, false, 1 2 3 4 5 6 7 8 9),
                (_, false) => by_rows!(self, avx512_rows, rows, 3, false, 1 2 3 4 5 6 7 8 9),
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    unsafe fn avx512_rows<const R: usize, const C: usize, const PACKED: bool>(&self) {
        use std::arch::x86_64::*;
        // SAFETY: the caller vouches for R rows of x (k floats each) and of the output (`columns` floats each, masked), and for k x 48
        // floats of the panel; a prefetch cannot fault.
        unsafe {
            let mut acc = [[_mm512_setzero_ps(); C]; R];
            let mut panel = self.panel;
            let mut x = self.x;
            for _ in 0..self.k {
                let mut b = [_mm512_setzero_ps(); C];
                for (c, b) in b.iter_mut().enumerate() {
                    *b = _mm512_loadu_ps(panel.add(c * 16));
                    if PACKED {
                        _mm_prefetch::<_MM_HINT_T0>(panel.wrapping_add(PREFETCH * PANEL + c * 16).cast());
                    }
                }
                for (r, acc) in acc.iter_mut().enumerate() {
                    let a = _mm512_set1_ps(if PACKED { *x.add(r) } else { *x.add(r * self.row_step) });
                    for (acc, b) in acc.iter_mut().zip(&b) {
                        *acc = _mm512_fmadd_ps(a, *b, *acc);
                    }
                }
                x = x.wrapping_add(if PACKED { R } else { 1 });
                panel = panel.wrapping_add(PANEL);
            }
            for (r, acc) in acc.iter().enumerate() {
                for (c, acc) in acc.iter().enumerate() {
                    let left = self.columns.saturating_sub(c * 16).min(16);
                    let mask = ((1_u32 << left) - 1) as __mmask16;
                    let at = self.out.wrapping_add(r * self.out_stride + c * 16);
                    let mut value = *acc;
                    if self.store == Store::Add {
                        value = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, at), value);
                    }
                    _mm512_mask_storeu_ps(at, mask, value);
                }
            }
        }
    }

    /// # Safety
    /// The pointers must be valid for `rows` rows, and the processor must have AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2(&self, rows: usize) {
        use std::arch::x86_64::*;
        const R: usize = 4;
        for first in (0..rows).step_by(R) {
            let count = R.min(rows - first);
            let mut result = [[0.0_f32; PANEL]; R];
            // SAFETY: as in `avx512_rows`; a row beyond `count` is the last one again, and `write` stores only `count` rows.
            unsafe {
                for half in 0..2 {
                    let mut acc = [[_mm256_setzero_ps(); 3]; R];
                    let mut panel = self.panel.add(half * 24);
                    let at: [*const f32; R] = std::array::from_fn(|r| self.x.add((first + r.min(count - 1)) * self.row_step));
                    for i in 0..self.k {
                        let b: [__m256; 3] = std::array::from_fn(|c| _mm256_loadu_ps(panel.add(c * 8)));
                        panel = panel.wrapping_add(PANEL);
                        for (acc, at) in acc.iter_mut().zip(&at) {
                            let a = _mm256_set1_ps(*at.add(i * self.k_step));
                            for (acc, b) in acc.iter_mut().zip(&b) {
                                *acc = _mm256_fmadd_ps(a, *b, *acc);
                            }
                        }
                    }
                    for (acc, result) in acc.iter().zip(&mut result) {
                        for (c, acc) in acc.iter().enumerate() {
                            _mm256_storeu_ps(result.as_mut_ptr().add(half * 24 + c * 8), *acc);
                        }
                    }
                }
                self.write(first, &result[..count]);
            }
        }
    }

    /// # Safety
    /// The pointers must be valid for `rows` rows.
    unsafe fn portable(&self, rows: usize) {
        for r in 0..rows {
            let mut acc = [0.0_f32; PANEL];
            // SAFETY: as in `avx2`.
            unsafe {
                for i in 0..self.k {
                    let b = std::slice::from_raw_parts(self.panel.add(i * PANEL), PANEL);
                    let a = *self.x.add(r * self.row_step + i * self.k_step);
                    for (acc, b) in acc.iter_mut().zip(b) {
                        *acc = fma::<{ !cfg!(target_arch = "x86_64") }>(a, *b, *acc);
                    }
                }
                self.write(r, &[acc]);
            }
        }
    }

    /// # Safety
    /// The output must have rows `first..` of `columns` floats for all of `result`.
    #[inline(always)]
    unsafe fn write(&self, first: usize, result: &[[f32; PANEL]]) {
        for (r, result) in result.iter().enumerate() {
            // SAFETY: passed on to the caller.
            let out = unsafe { std::slice::from_raw_parts_mut(self.out.add((first + r) * self.out_stride), self.columns) };
            for (out, value) in out.iter_mut().zip(result) {
                *out = if self.store == Store::Add { *out + *value } else { *value };
            }
        }
    }
}

/// `a * b + c`, fused where `FUSED` (the portable code of a processor that may lack the instruction rounds twice instead).
#[inline(always)]
fn fma<const FUSED: bool>(a: f32, b: f32, c: f32) -> f32 {
    if FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// Compiles a loop for each instruction set and picks one at run time; the compiler vectorises it.
macro_rules! dispatched {
    ($(#[$meta:meta])* fn $name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)? = $body:ident) => {
        $(#[$meta])*
        #[allow(clippy::too_many_arguments)]
        pub(super) fn $name(isa: Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f")]
                fn avx512($($arg: $ty),*) $(-> $ret)? { $body::<true>($($arg),*) }
                #[target_feature(enable = "avx2,fma")]
                fn avx2($($arg: $ty),*) $(-> $ret)? { $body::<true>($($arg),*) }
                match isa {
                    // SAFETY: an `Isa` is only made for what the processor was found to have.
                    Isa::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    Isa::Avx2 => return unsafe { avx2($($arg),*) },
                    Isa::Portable => {}
                }
            }
            let _ = isa;
            $body::<{ !cfg!(target_arch = "x86_64") }>($($arg),*)
        }
    };
}

dispatched! {
    /// Dot product in 16 interleaved partial sums, added up in a fixed order.
    fn dot(a: &[f32], b: &[f32]) -> f32 = dot_body
}
dispatched! {
    /// `out = x / sqrt(mean(x^2) + eps) * weight`.
    fn rms_norm(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) = rms_norm_body
}
dispatched! {
    /// `x = x / sqrt(mean(x^2) + eps) * weight`.
    fn rms_norm_in_place(x: &mut [f32], weight: &[f32], eps: f32) = rms_norm_in_place_body
}
dispatched! {
    /// `out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`.
    fn layer_norm(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) = layer_norm_body
}
dispatched! {
    /// `out = activation(gate) * up`, where `x` holds gate, then up.
    fn gate(activation: Activation, x: &[f32], out: &mut [f32]) = gate_body
}
dispatched! {
    /// Activates each number in place.
    fn activate(activation: Activation, x: &mut [f32]) = activate_body
}
dispatched! {
    /// `x *= activation(gate)`, or `x *= sigmoid(gate)` without one.
    fn mul_gate(activation: Option<Activation>, gate: &[f32], x: &mut [f32]) = mul_gate_body
}
dispatched! {
    /// `sum += x * weights`.
    fn multiply_add(x: &[f32], weights: &[f32], sum: &mut [f32]) = multiply_add_body
}
dispatched! {
    /// One step of the delta rule on a state of `k.len()` rows of `v.len()` numbers: it decays, learns `v` at `k` as far as `beta` says,
    /// and is read at `q`. `delta` is a buffer of `v.len()` numbers.
    fn delta_step(state: &mut [f32], q: &[f32], k: &[f32], v: &[f32], decay: f32, beta: f32, delta: &mut [f32], out: &mut [f32]) = delta_step_body
}
dispatched! {
    /// `cap * tanh(x / cap)` in place.
    fn soft_cap(x: &mut [f32], cap: f32) = soft_cap_body
}
dispatched! {
    /// The largest of some numbers.
    fn largest(x: &[f32]) -> f32 = largest_body
}
dispatched! {
    /// The sum of `e^(x - top)`.
    fn sum_exp(x: &[f32], top: f32) -> f32 = sum_exp_body
}
dispatched! {
    /// The sums of `e^(x - top)` and of `e^(x - top) (x - y)`.
    fn sum_exp_weighted(x: &[f32], y: &[f32], top: f32) -> (f32, f32) = sum_exp_weighted_body
}
dispatched! {
    /// [`softmax`] as a loop.
    fn softmax_loop(scores: &mut [f32], keep: usize, scale: f32) = softmax_body
}

/// Softmax of `scale * scores[..keep]` in place; what comes after is set to 0.
pub(super) fn softmax(isa: Isa, scores: &mut [f32], keep: usize, scale: f32) {
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx512 {
        // SAFETY: an `Isa` is only made for what the processor was found to have.
        return unsafe { softmax_avx512(scores, keep, scale) };
    }
    softmax_loop(isa, scores, keep, scale);
}

/// The loop's operations in its order, the last numbers in a register that they do not fill.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn softmax_avx512(scores: &mut [f32], keep: usize, scale: f32) {
    use std::arch::x86_64::*;
    let (kept, rest) = scores.split_at_mut(keep);
    rest.fill(0.0);
    // SAFETY: the masks keep loads and stores inside the slice; `x` is 16 floats.
    unsafe {
        let lanes = |at: usize| ((1_u32 << (keep - at).min(16)) - 1) as __mmask16;
        let start = kept.as_mut_ptr();
        let mut top = _mm512_set1_ps(f32::NEG_INFINITY);
        for at in (0..keep).step_by(16) {
            top = _mm512_mask_max_ps(top, lanes(at), _mm512_maskz_loadu_ps(lanes(at), start.add(at)), top);
        }
        let top = _mm512_set1_ps(_mm512_reduce_max_ps(top));
        let mut sums = _mm512_setzero_ps();
        for at in (0..keep).step_by(16) {
            let mut x = [0.0; 16];
            let scaled = _mm512_mul_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(lanes(at), start.add(at)), top), _mm512_set1_ps(scale));
            _mm512_storeu_ps(x.as_mut_ptr(), scaled);
            x.iter_mut().for_each(|v| *v = exp::<true>(*v));
            let x = _mm512_loadu_ps(x.as_ptr());
            _mm512_mask_storeu_ps(start.add(at), lanes(at), x);
            sums = _mm512_mask_add_ps(sums, lanes(at), sums, x);
        }
        let mut lane_sums = [0.0; 16];
        _mm512_storeu_ps(lane_sums.as_mut_ptr(), sums);
        let inverse = _mm512_set1_ps(1.0 / total(&lane_sums));
        for at in (0..keep).step_by(16) {
            let x = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes(at), start.add(at)), inverse);
            _mm512_mask_storeu_ps(start.add(at), lanes(at), x);
        }
    }
}
dispatched! {
    /// Rotates pairs `(x[i], x[i + half])` by the angles whose cosines and sines are given (rotary embedding, halves layout).
    fn rotate(x: &mut [f32], cos: &[f32], sin: &[f32]) = rotate_body
}

dispatched! {
    /// Adds to the sums of a panel's 48 columns the products of row `row` of `x` (of which `rows` lie pair by pair) with it: pairs of bf16 numbers.
    fn dot_pairs(x: &[u32], rows: usize, row: usize, panel: &[u32], sums: &mut [f32; PANEL]) = dot_pairs_body
}

#[inline(always)]
fn dot_pairs_body<const F: bool>(x: &[u32], rows: usize, row: usize, panel: &[u32], sums: &mut [f32; PANEL]) {
    let (low, high) = (|v: u32| f32::from_bits(v << 16), |v: u32| f32::from_bits(v & 0xffff_0000));
    let mut acc = *sums;
    for (x, panel) in x.iter().skip(row).step_by(rows).zip(panel.as_chunks::<PANEL>().0) {
        for (acc, w) in acc.iter_mut().zip(panel) {
            *acc = fma::<F>(low(*x), low(*w), *acc);
            *acc = fma::<F>(high(*x), high(*w), *acc);
        }
    }
    *sums = acc;
}

dispatched! {
    /// [`quantise`] as a loop.
    fn quantise_loop(x: &[f32], rotated: &mut [f32], out: &mut [u8], stride: usize) -> f32 = quantise_body
}

/// Turns numbers into 8-bit integers and returns what one is worth: blocks of [`SPREAD`] (the last filled up with zeros) are multiplied by a
/// Hadamard matrix, and all of them scaled so that the largest becomes 127. Blocks of integers are written `stride` bytes apart;
/// `rotated` is a buffer of as many floats as there are integers. Numbers that are not finite make the returned scale so.
pub(super) fn quantise(isa: Isa, x: &[f32], rotated: &mut [f32], out: &mut [u8], stride: usize) -> f32 {
    #[cfg(target_arch = "x86_64")]
    if isa == Isa::Avx512 {
        // SAFETY: an `Isa` is only made for what the processor was found to have.
        return unsafe { quantise_avx512(x, rotated, out, stride) };
    }
    quantise_loop(isa, x, rotated, out, stride)
}

/// What an integer is worth where `top` becomes 127, and how many integers a unit is.
#[inline(always)]
fn steps(top: f32) -> (f32, f32) {
    (top / 127.0, if top > 1e-30 { 127.0 / top } else { 0.0 })
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw")]
fn quantise_avx512(x: &[f32], rotated: &mut [f32], out: &mut [u8], stride: usize) -> f32 {
    use std::arch::x86_64::*;
    let sign = |distance: u16| {
        let minus = (0..16).filter(|i| i & distance != 0).fold(0, |mask: u16, i| mask | 1 << i);
        _mm512_mask_blend_ps(minus, _mm512_set1_ps(1.0), _mm512_set1_ps(-1.0))
    };
    let signs = [sign(8), sign(4), sign(2), sign(1)];
    let absolute = _mm512_set1_epi32(0x7fff_ffff);
    let mut tops = _mm512_setzero_si512();
    let blocks = x.len().div_ceil(SPREAD);
    let rotated = &mut rotated.as_chunks_mut::<SPREAD>().0[..blocks];
    for (x, rotated) in x.chunks(SPREAD).zip(rotated.iter_mut()) {
        let [a, b, c, d] = std::array::from_fn(|i| {
            let left = x.len().saturating_sub(i * 16).min(16);
            // SAFETY: the mask keeps the load inside the block.
            unsafe { _mm512_maskz_loadu_ps(((1_u32 << left) - 1) as u16, x.as_ptr().wrapping_add(i * 16)) }
        });
        let (a, b, c, d) = (_mm512_add_ps(a, c), _mm512_add_ps(b, d), _mm512_sub_ps(a, c), _mm512_sub_ps(b, d));
        let v = [_mm512_add_ps(a, b), _mm512_sub_ps(a, b), _mm512_add_ps(c, d), _mm512_sub_ps(c, d)];
        for (v, line) in v.into_iter().zip(rotated.as_chunks_mut::<16>().0) {
            // Each number and the one at a distance: the sum where it is the first of both, else the difference.
            let v = _mm512_fmadd_ps(v, signs[0], _mm512_shuffle_f32x4::<0b01_00_11_10>(v, v));
            let v = _mm512_fmadd_ps(v, signs[1], _mm512_shuffle_f32x4::<0b10_11_00_01>(v, v));
            let v = _mm512_fmadd_ps(v, signs[2], _mm512_permute_ps::<0b01_00_11_10>(v));
            let v = _mm512_fmadd_ps(v, signs[3], _mm512_permute_ps::<0b10_11_00_01>(v));
            tops = _mm512_max_epu32(tops, _mm512_and_si512(_mm512_castps_si512(v), absolute));
            // SAFETY: 16 floats.
            unsafe { _mm512_storeu_ps(line.as_mut_ptr(), v) };
        }
    }
    let (scale, inverse) = steps(f32::from_bits(_mm512_reduce_max_epu32(tops)));
    let inverse = _mm512_set1_ps(inverse);
    // Packing goes by quarters of registers: quarter `q` of register `r` is put where it belongs.
    let order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    for (rotated, out) in rotated.iter().zip(out.chunks_mut(stride)) {
        // SAFETY: 64 floats in, 64 bytes out.
        unsafe {
            let [a, b, c, d] =
                std::array::from_fn(|i| _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_loadu_ps(rotated.as_ptr().add(i * 16)), inverse)));
            let bytes = _mm512_packs_epi16(_mm512_packs_epi32(a, b), _mm512_packs_epi32(c, d));
            _mm512_storeu_si512(out[..SPREAD].as_mut_ptr().cast(), _mm512_permutexvar_epi32(order, bytes));
        }
    }
    scale
}

/// Numbers that a Hadamard matrix mixes.
pub(super) const SPREAD: usize = 64;

/// Multiplies by the Hadamard matrix of order 64 (without its factor of 1/8): sums and differences at distances of 32, 16, 8, 4, 2 and 1.
#[inline(always)]
fn hadamard(v: &mut [[f32; 16]; 4]) {
    for distance in [2, 1] {
        for i in (0..4).filter(|i| i & distance == 0) {
            let (a, b) = (v[i], v[i + distance]);
            v[i] = std::array::from_fn(|lane| a[lane] + b[lane]);
            v[i + distance] = std::array::from_fn(|lane| a[lane] - b[lane]);
        }
    }
    for v in v {
        macro_rules! lanes {
            ($($distance:literal)+) => {
                $(let other: [f32; 16] = std::array::from_fn(|i| v[i ^ $distance]);
                *v = std::array::from_fn(|i| other[i] + if i & $distance == 0 { v[i] } else { -v[i] });)+
            };
        }
        lanes!(8 4 2 1);
    }
}

#[inline(always)]
fn quantise_body<const F: bool>(x: &[f32], rotated: &mut [f32], out: &mut [u8], stride: usize) -> f32 {
    // By their bits, so that what is not a number is the largest of all.
    let mut tops = [0_u32; 16];
    let blocks = x.len().div_ceil(SPREAD);
    let rotated = &mut rotated.as_chunks_mut::<SPREAD>().0[..blocks];
    for (x, rotated) in x.chunks(SPREAD).zip(rotated.iter_mut()) {
        let mut v = [[0.0_f32; 16]; 4];
        v.as_flattened_mut()[..x.len()].copy_from_slice(x);
        hadamard(&mut v);
        for v in &v {
            for (top, v) in tops.iter_mut().zip(v) {
                *top = (*top).max(v.to_bits() & 0x7fff_ffff);
            }
        }
        rotated.copy_from_slice(v.as_flattened());
    }
    let (scale, inverse) = steps(f32::from_bits(tops.iter().copied().fold(0, u32::max)));
    for (rotated, out) in rotated.iter().zip(out.chunks_mut(stride)) {
        for (out, v) in out[..SPREAD].iter_mut().zip(rotated) {
            // Adding 1.5 * 2^23 rounds to an integer, ties to even, whose two's complement the lowest bits then are.
            *out = (v * inverse + 12_582_912.0).to_bits() as u8;
        }
    }
    scale
}

dispatched! {
    /// Splits floats into three bf16 parts each, rounded to nearest, that add up to it: all first parts, then all second, then all third.
    fn split_parts(x: &[f32], parts: &mut [u16]) = split_parts_body
}

/// The nearest bf16 number, ties to even, as the bits of a float.
#[inline(always)]
pub(super) fn round_bf16(v: f32) -> u32 {
    let bits = v.to_bits();
    bits.wrapping_add(0x7fff + (bits >> 16 & 1)) & 0xffff_0000
}

/// Two numbers side by side, the first in the lower half.
#[inline(always)]
pub(super) fn pair(values: &[f32]) -> u32 {
    round_bf16(values[0]) >> 16 | values.get(1).map_or(0, |v| round_bf16(*v))
}

dispatched! {
    /// Rounds to bf16, two numbers side by side: a [`pair`] for each two.
    fn round_pairs(x: &[f32], out: &mut [u32]) = round_pairs_body
}

#[inline(always)]
fn round_pairs_body<const F: bool>(x: &[f32], out: &mut [u32]) {
    let (twos, rest) = x.as_chunks::<2>();
    for (out, two) in out.iter_mut().zip(twos) {
        *out = pair(two);
    }
    if let Some(out) = out.get_mut(twos.len()).filter(|_| !rest.is_empty()) {
        *out = pair(rest);
    }
}

#[inline(always)]
fn split_parts_body<const F: bool>(x: &[f32], parts: &mut [u16]) {
    let (first, rest) = parts.split_at_mut(x.len());
    let (second, third) = rest.split_at_mut(x.len());
    for (((x, a), b), c) in x.iter().zip(first).zip(second).zip(third) {
        let high = round_bf16(*x);
        let left = x - f32::from_bits(high);
        let middle = round_bf16(left);
        let low = round_bf16(left - f32::from_bits(middle));
        (*a, *b, *c) = ((high >> 16) as u16, (middle >> 16) as u16, (low >> 16) as u16);
    }
}

#[inline(always)]
fn dot_body<const F: bool>(a: &[f32], b: &[f32]) -> f32 {
    let mut sums = [0.0_f32; 16];
    let (a16, a_rest) = a.as_chunks::<16>();
    let (b16, b_rest) = b.as_chunks::<16>();
    for (a, b) in a16.iter().zip(b16) {
        for i in 0..16 {
            sums[i] = fma::<F>(a[i], b[i], sums[i]);
        }
    }
    for (i, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
        sums[i] = fma::<F>(*a, *b, sums[i]);
    }
    total(&sums)
}

#[inline(always)]
fn total(sums: &[f32; 16]) -> f32 {
    let mut s = *sums;
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            s[i] += s[i + width];
        }
    }
    s[0]
}

#[inline(always)]
fn rms_norm_body<const F: bool>(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
    let scale = 1.0 / (dot_body::<F>(x, x) / x.len() as f32 + eps).sqrt();
    for ((out, x), w) in out.iter_mut().zip(x).zip(weight) {
        *out = x * scale * w;
    }
}

#[inline(always)]
fn rms_norm_in_place_body<const F: bool>(x: &mut [f32], weight: &[f32], eps: f32) {
    let scale = 1.0 / (dot_body::<F>(x, x) / x.len() as f32 + eps).sqrt();
    for (x, w) in x.iter_mut().zip(weight) {
        *x = *x * scale * w;
    }
}

/// e^x to about 1 ulp for x in [-87, 88], 0 below, clamped above: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2].
#[inline(always)]
pub(super) fn exp<const F: bool>(x: f32) -> f32 {
    const MAGIC: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer
    let clamped = x.clamp(-87.0, 88.0);
    let shifted = fma::<F>(clamped, std::f32::consts::LOG2_E, MAGIC);
    let n = shifted - MAGIC;
    let r = fma::<F>(n, -0.693_359_4, clamped);
    let r = fma::<F>(n, 2.121_944_4e-4, r);
    let mut p = 1.987_569_2e-4;
    p = fma::<F>(p, r, 1.398_199_9e-3);
    p = fma::<F>(p, r, 8.333_452e-3);
    p = fma::<F>(p, r, 4.166_579_6e-2);
    p = fma::<F>(p, r, 1.666_666_5e-1);
    p = fma::<F>(p, r, 0.5);
    p = fma::<F>(p * r, r, r) + 1.0;
    let power = f32::from_bits((shifted.to_bits() << 23).wrapping_add(127 << 23));
    if x < -87.0 { 0.0 } else { p * power }
}

/// 2^x to 3e-6 of it, for what is rounded to bf16 next.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
#[inline]
pub(super) fn power_of_two(x: std::arch::x86_64::__m512) -> std::arch::x86_64::__m512 {
    use std::arch::x86_64::*;
    let whole = _mm512_roundscale_ps::<0>(x);
    let f = _mm512_sub_ps(x, whole);
    // The nearest polynomial of degree 4 on [-1/2, 1/2], in relative error.
    let mut p = _mm512_set1_ps(0.009_560_51);
    for c in [0.055_917_04, 0.240_249_81, 0.693_121_97, 0.999_999_2] {
        p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c));
    }
    _mm512_scalef_ps(p, whole)
}

/// The non-linear function of a feed-forward layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `x / (1 + e^-x)`.
    Silu,
    /// `x/2 (1 + erf(x / sqrt 2))`.
    Gelu,
    /// `x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`.
    GeluTanh,
}

#[inline(always)]
fn sigmoid<const F: bool>(x: f32) -> f32 {
    1.0 / (1.0 + exp::<F>(-x))
}

#[inline(always)]
fn silu<const F: bool>(x: f32) -> f32 {
    x * sigmoid::<F>(x)
}

/// By Chebyshev's fit of erfc (relative error below 1.2e-7), as `x (1 - erfc(x / sqrt 2) / 2)` for the sign at hand.
#[inline(always)]
fn gelu<const F: bool>(x: f32) -> f32 {
    const FIT: [f32; 9] =
        [0.170_872_77, -0.822_152_23, 1.488_515_9, -1.135_204, 0.278_868_07, -0.186_288_06, 0.096_784_18, 0.374_091_96, 1.000_023_7];
    let z = x.abs() * std::f32::consts::FRAC_1_SQRT_2;
    let t = 1.0 / fma::<F>(0.5, z, 1.0);
    let mut p = FIT[0];
    for c in &FIT[1..] {
        p = fma::<F>(p, t, *c);
    }
    let half = 0.5 * t * exp::<F>(fma::<F>(-z, z, fma::<F>(p, t, -1.265_512_2)));
    x * if x < 0.0 { half } else { 1.0 - half }
}

/// `1 + tanh(u) = 2 sigmoid(2u)`.
#[inline(always)]
fn gelu_tanh<const F: bool>(x: f32) -> f32 {
    const SCALE: f32 = 1.595_769; // 2 sqrt(2 / pi)
    x * sigmoid::<F>(SCALE * x * fma::<F>(0.044_715 * x, x, 1.0))
}

impl Activation {
    /// Activates each number of a row of fixed length; meant to be compiled into a kernel.
    #[inline(always)]
    pub(super) fn apply<const F: bool>(self, x: &mut [f32]) {
        match self {
            Self::Silu => x.iter_mut().for_each(|v| *v = silu::<F>(*v)),
            Self::Gelu => x.iter_mut().for_each(|v| *v = gelu::<F>(*v)),
            Self::GeluTanh => x.iter_mut().for_each(|v| *v = gelu_tanh::<F>(*v)),
        }
    }
}

#[inline(always)]
fn activate_body<const F: bool>(activation: Activation, x: &mut [f32]) {
    activation.apply::<F>(x);
}

#[inline(always)]
fn gate_body<const F: bool>(activation: Activation, x: &[f32], out: &mut [f32]) {
    let (gate, up) = x.split_at(x.len() / 2);
    out.copy_from_slice(gate);
    activation.apply::<F>(out);
    for (out, u) in out.iter_mut().zip(up) {
        *out *= u;
    }
}

#[inline(always)]
fn mul_gate_body<const F: bool>(activation: Option<Activation>, gate: &[f32], x: &mut [f32]) {
    match activation {
        None => x.iter_mut().zip(gate).for_each(|(x, g)| *x *= sigmoid::<F>(*g)),
        Some(Activation::Silu) => x.iter_mut().zip(gate).for_each(|(x, g)| *x *= silu::<F>(*g)),
        Some(Activation::Gelu) => x.iter_mut().zip(gate).for_each(|(x, g)| *x *= gelu::<F>(*g)),
        Some(Activation::GeluTanh) => x.iter_mut().zip(gate).for_each(|(x, g)| *x *= gelu_tanh::<F>(*g)),
    }
}

#[inline(always)]
fn multiply_add_body<const F: bool>(x: &[f32], weights: &[f32], sum: &mut [f32]) {
    for ((sum, x), w) in sum.iter_mut().zip(x).zip(weights) {
        *sum = fma::<F>(*x, *w, *sum);
    }
}

#[inline(always)]
#[allow(clippy::too_many_arguments)]
fn delta_step_body<const F: bool>(
    state: &mut [f32],
    q: &[f32],
    k: &[f32],
    v: &[f32],
    decay: f32,
    beta: f32,
    delta: &mut [f32],
    out: &mut [f32],
) {
    delta.fill(0.0);
    for (row, k) in state.chunks_exact_mut(v.len()).zip(k) {
        for (s, known) in row.iter_mut().zip(delta.iter_mut()) {
            *s *= decay;
            *known = fma::<F>(*s, *k, *known);
        }
    }
    for (delta, v) in delta.iter_mut().zip(v) {
        *delta = (v - *delta) * beta;
    }
    out.fill(0.0);
    for ((row, k), q) in state.chunks_exact_mut(v.len()).zip(k).zip(q) {
        for ((s, delta), out) in row.iter_mut().zip(delta.iter()).zip(out.iter_mut()) {
            *s = fma::<F>(*k, *delta, *s);
            *out = fma::<F>(*s, *q, *out);
        }
    }
}

#[inline(always)]
fn soft_cap_body<const F: bool>(x: &mut [f32], cap: f32) {
    for v in x {
        // tanh(u) = 2 sigmoid(2u) - 1; near 0, where that loses digits, the logits it makes are near 0 too.
        *v = cap * fma::<F>(2.0, sigmoid::<F>(2.0 / cap * *v), -1.0);
    }
}

#[inline(always)]
fn layer_norm_body<const F: bool>(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) {
    let n = x.len() as f32;
    let mean = sum_of(x, |v| v) / n;
    for (out, x) in out.iter_mut().zip(x) {
        *out = x - mean;
    }
    let scale = 1.0 / (dot_body::<F>(out, out) / n + eps).sqrt();
    for ((out, w), b) in out.iter_mut().zip(weight).zip(bias) {
        *out = fma::<F>(*out * scale, *w, *b);
    }
}

/// The sum of `of(x)`, in 16 interleaved partial sums, added up in a fixed order.
#[inline(always)]
fn sum_of(x: &[f32], of: impl Fn(f32) -> f32) -> f32 {
    let mut sums = [0.0_f32; 16];
    let (chunks, rest) = x.as_chunks::<16>();
    for chunk in chunks {
        for (sum, v) in sums.iter_mut().zip(chunk) {
            *sum += of(*v);
        }
    }
    for (sum, v) in sums.iter_mut().zip(rest) {
        *sum += of(*v);
    }
    total(&sums)
}

#[inline(always)]
fn largest_body<const F: bool>(x: &[f32]) -> f32 {
    let mut tops = [f32::NEG_INFINITY; 16];
    let (chunks, rest) = x.as_chunks::<16>();
    for chunk in chunks {
        for (top, v) in tops.iter_mut().zip(chunk) {
            *top = if *v > *top { *v } else { *top };
        }
    }
    for (top, v) in tops.iter_mut().zip(rest) {
        *top = if *v > *top { *v } else { *top };
    }
    tops.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a })
}

#[inline(always)]
fn sum_exp_body<const F: bool>(x: &[f32], top: f32) -> f32 {
    sum_of(x, |v| exp::<F>(v - top))
}

#[inline(always)]
fn sum_exp_weighted_body<const F: bool>(x: &[f32], y: &[f32], top: f32) -> (f32, f32) {
    let (mut sums, mut weighted) = ([0.0_f32; 16], [0.0_f32; 16]);
    let (x16, x_rest) = x.as_chunks::<16>();
    let (y16, y_rest) = y.as_chunks::<16>();
    for (x, y) in x16.iter().zip(y16) {
        for i in 0..16 {
            let e = exp::<F>(x[i] - top);
            sums[i] += e;
            weighted[i] = fma::<F>(e, x[i] - y[i], weighted[i]);
        }
    }
    for (i, (x, y)) in x_rest.iter().zip(y_rest).enumerate() {
        let e = exp::<F>(x - top);
        sums[i] += e;
        weighted[i] = fma::<F>(e, x - y, weighted[i]);
    }
    (total(&sums), total(&weighted))
}

#[inline(always)]
fn softmax_body<const F: bool>(scores: &mut [f32], keep: usize, scale: f32) {
    let (kept, rest) = scores.split_at_mut(keep);
    rest.fill(0.0);
    let top = largest_body::<F>(kept);
    let (chunks, tail) = kept.as_chunks_mut::<16>();
    let mut sums = [0.0_f32; 16];
    for chunk in chunks.iter_mut() {
        for i in 0..16 {
            chunk[i] = exp::<F>((chunk[i] - top) * scale);
            sums[i] += chunk[i];
        }
    }
    for (s, sum) in tail.iter_mut().zip(&mut sums) {
        *s = exp::<F>((*s - top) * scale);
        *sum += *s;
    }
    let inverse = 1.0 / total(&sums);
    for s in kept {
        *s *= inverse;
    }
}

#[inline(always)]
fn rotate_body<const F: bool>(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (low, high) = x.split_at_mut(cos.len());
    for (((a, b), c), s) in low.iter_mut().zip(high).zip(cos).zip(sin) {
        let (x, y) = (*a, *b);
        *a = fma::<F>(x, *c, -(y * s));
        *b = fma::<F>(y, *c, x * s);
    }
}

/// Numbers in [-1, 1) for tests.
#[cfg(test)]
pub(super) fn floats(n: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pack(w: &[f32], n: usize, k: usize) -> Vec<f32> {
        let mut panels = vec![0.0; n.div_ceil(PANEL) * PANEL * k];
        for (j, row) in w.chunks_exact(k).enumerate() {
            for (i, v) in row.iter().enumerate() {
                panels[(j / PANEL) * PANEL * k + i * PANEL + j % PANEL] = *v;
            }
        }
        panels
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn products_match_f64_on_ragged_shapes(m in 1usize..30, n in 1usize..80, k in 1usize..90, seed in 0u64..1000) {
            let (x, w) = (floats(m * k, seed), floats(n * k, seed + 1));
            let panels = pack(&w, n, k);
            let mut fused: Option<Vec<f32>> = None;
            for isa in Isa::available() {
                let plain = Rows { data: &x, rows: m, width: k, stride: k };
                let mut out = vec![1.0_f32; m * n];
                product(isa, Input::Plain(plain), &panels, n, &mut out, n, Store::Add);
                let mut packed = Block::default();
                pack_rows(plain, &mut packed);
                let mut again = vec![1.0_f32; m * n];
                let input = Input::Packed { data: &packed, rows: m, width: k };
                product(isa, input, &panels, n, &mut again, n, Store::Add);
                prop_assert_eq!(&again, &out);
                for r in 0..m {
                    for c in 0..n {
                        let exact: f64 = (0..k).map(|i| f64::from(x[r * k + i]) * f64::from(w[c * k + i])).sum();
                        prop_assert!((f64::from(out[r * n + c]) - 1.0 - exact).abs() < 1e-4);
                    }
                }
                // A row alone has the bits it has among others.
                let mut alone = vec![1.0_f32; n];
                product(isa, Input::Plain(Rows { data: &x[(m - 1) * k..], rows: 1, ..plain }), &panels, n, &mut alone, n, Store::Add);
                prop_assert_eq!(&alone[..], &out[(m - 1) * n..]);
                if isa != Isa::Portable {
                    prop_assert_eq!(fused.get_or_insert_with(|| out.clone()), &out);
                }
            }
        }

        #[test]
        fn loops_match_f64(n in 1usize..70, seed in 0u64..1000) {
            let (a, b) = (floats(n, seed), floats(n, seed + 7));
            for isa in Isa::available() {
                if isa != Isa::Portable {
                    // Every length up to the whole, with the same bits.
                    for keep in 1..=n {
                        let [mut one, mut other] = [a.clone(), a.clone()];
                        softmax(isa, &mut one, keep, 0.5);
                        softmax_loop(isa, &mut other, keep, 0.5);
                        prop_assert!(one == other, "{isa:?}");
                    }
                }
                let exact: f64 = a.iter().zip(&b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum();
                prop_assert!((f64::from(dot(isa, &a, &b)) - exact).abs() < 1e-5);

                let mut scores: Vec<f32> = a.iter().map(|v| v * 20.0).collect();
                scores.push(9.0);
                softmax(isa, &mut scores, n, 0.5);
                let top = a.iter().fold(f64::MIN, |m, &v| m.max(f64::from(v) * 10.0));
                let sum: f64 = a.iter().map(|&v| (f64::from(v) * 10.0 - top).exp()).sum();
                for (s, v) in scores.iter().zip(&a) {
                    prop_assert!((f64::from(*s) - (f64::from(*v) * 10.0 - top).exp() / sum).abs() < 1e-6);
                }
                prop_assert_eq!(scores[n], 0.0);

                let both: Vec<f32> = a.iter().chain(&b).map(|v| v * 9.0).collect();
                let mut out = vec![0.0; n];
                for activation in [Activation::Silu, Activation::Gelu, Activation::GeluTanh] {
                    gate(isa, activation, &both, &mut out);
                    for i in 0..n {
                        let exact = exactly(activation, f64::from(both[i])) * f64::from(both[n + i]);
                        prop_assert!((f64::from(out[i]) - exact).abs() < 2e-5, "{activation:?} {} {}", both[i], both[n + i]);
                    }
                }

                layer_norm(isa, &a, &b, &a, 1e-5, &mut out);
                let mean = a.iter().map(|v| f64::from(*v)).sum::<f64>() / n as f64;
                let variance = a.iter().map(|v| (f64::from(*v) - mean).powi(2)).sum::<f64>() / n as f64;
                for i in 0..n {
                    let exact = (f64::from(a[i]) - mean) / (variance + 1e-5).sqrt() * f64::from(b[i]) + f64::from(a[i]);
                    prop_assert!((f64::from(out[i]) - exact).abs() < 1e-4);
                }
            }
        }
    }

    /// The activation in f64; erf by its series.
    fn exactly(activation: Activation, x: f64) -> f64 {
        match activation {
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::GeluTanh => 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x.powi(3))).tanh()),
            Activation::Gelu => {
                let z = x / 2.0_f64.sqrt();
                if z.abs() > 4.0 {
                    return if x > 0.0 { x } else { 0.0 };
                }
                let (mut term, mut sum) = (z, z);
                for n in 1..200 {
                    term *= -z * z / f64::from(n);
                    sum += term / f64::from(2 * n + 1);
                }
                0.5 * x * (1.0 + (2.0 / std::f64::consts::PI.sqrt() * sum))
            }
        }
    }

    #[test]
    fn caps_are_accurate() {
        for isa in Isa::available() {
            let mut x: Vec<f32> = (-400..400).map(|i| i as f32 / 4.0).collect();
            let before = x.clone();
            soft_cap(isa, &mut x, 30.0);
            for (x, before) in x.iter().zip(before) {
                assert!((f64::from(*x) - 30.0 * (f64::from(before) / 30.0).tanh()).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn exp_is_accurate_and_safe_at_the_ends() {
        for i in -8700..8800 {
            let x = i as f32 / 100.0;
            let exact = f64::from(x).exp();
            assert!((f64::from(exp::<true>(x)) / exact - 1.0).abs() < 3e-7, "{x}");
        }
        assert_eq!(exp::<true>(-1000.0), 0.0);
        assert_eq!(exp::<true>(f32::NEG_INFINITY), 0.0);
        assert!(exp::<true>(1000.0).is_finite() && exp::<true>(f32::NAN).is_nan());
    }
}
