//! Kernels with run-time dispatch: AVX-512, AVX2 with FMA, or portable code.
//!
//! The only module with `unsafe`. Every kernel works row by row: an output row is one fixed sequence of operations on its own input
//! row, so it has the same bits whatever rows stand beside it. Products accumulate over k in order, one fused multiply-add a step, so
//! that AVX-512, AVX2 and portable code on a processor with fused multiply-add give the same bits too.
#![allow(unsafe_code)]

use std::sync::OnceLock;

/// Columns of one packed panel of weights.
pub(super) const PANEL: usize = 32;

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
            if fma && is_x86_feature_detected!("avx512f") {
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

/// Sixteen floats on a cache line of their own.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; 16]);

/// A float buffer that starts on a cache line.
#[derive(Debug, Clone, Default)]
pub(crate) struct Aligned {
    lines: Vec<Line>,
}

impl Aligned {
    /// Grows to at least `len` floats, which keep or have any value.
    pub(super) fn reserve(&mut self, len: usize) {
        let lines = len.div_ceil(16);
        if self.lines.len() < lines {
            self.lines.resize(lines, Line([0.0; 16]));
        }
    }

    pub(super) fn as_slice(&self) -> &[f32] {
        // SAFETY: `Line` is exactly sixteen floats without padding (64 bytes, repr(C)), so the vector's memory is one float slice.
        unsafe { std::slice::from_raw_parts(self.lines.as_ptr().cast(), self.lines.len() * 16) }
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [f32] {
        // SAFETY: as in `as_slice`; the borrow of `self` is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), self.lines.len() * 16) }
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

/// A matrix in memory: rows of `width` floats, `stride` apart.
#[derive(Debug, Clone, Copy)]
pub(super) struct View {
    pub(super) rows: usize,
    pub(super) width: usize,
    pub(super) stride: usize,
}

/// `out = x * panels` (or `out += ...`): x is `rows x k`, the panels hold a `k x n` matrix as ceil(n / 32) blocks of `k x 32` floats.
///
/// Panics if a slice is shorter than its view says, which is a mistake of the caller in this module tree.
pub(super) fn product(isa: Isa, x: &[f32], xv: View, panels: &[f32], n: usize, out: &mut [f32], out_stride: usize, store: Store) {
    let k = xv.width;
    if xv.rows == 0 || n == 0 {
        return;
    }
    assert!(x.len() >= (xv.rows - 1) * xv.stride + k, "input is shorter than its view");
    assert!(panels.len() >= n.div_ceil(PANEL) * PANEL * k, "panels are shorter than k x n");
    assert!(out.len() >= (xv.rows - 1) * out_stride + n, "output is shorter than rows x n");
    for (p, panel) in panels.chunks_exact(PANEL * k.max(1)).take(n.div_ceil(PANEL)).enumerate() {
        let columns = (n - p * PANEL).min(PANEL);
        let step = match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => 12,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => 6,
            Isa::Portable => 4,
        };
        let mut row = 0;
        while row < xv.rows {
            let rows = (xv.rows - row).min(step);
            // SAFETY: `row + rows <= xv.rows`, so with the three assertions above every pointer that a tile computes (rows of x at
            // `xv.stride`, rows of the output at `out_stride`, k x 32 floats of the panel) lies inside its slice; the instruction set
            // was detected on this processor.
            unsafe {
                let x = x.as_ptr().add(row * xv.stride);
                let out = out.as_mut_ptr().add(row * out_stride + p * PANEL);
                let tile = Tile { x, x_stride: xv.stride, k, panel: panel.as_ptr(), out, out_stride, columns, store };
                match isa {
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx512 => tile.avx512(rows),
                    #[cfg(target_arch = "x86_64")]
                    Isa::Avx2 => tile.avx2(rows),
                    Isa::Portable => tile.portable(rows),
                }
            }
            row += rows;
        }
    }
}

/// A few rows of the input times one panel.
struct Tile {
    x: *const f32,
    x_stride: usize,
    k: usize,
    panel: *const f32,
    out: *mut f32,
    out_stride: usize,
    columns: usize,
    store: Store,
}

macro_rules! by_rows {
    ($self:ident, $f:ident, $rows:expr, $($r:literal)+) => {
        match $rows {
            $($r => $self.$f::<$r>(),)+
            _ => unreachable!("a tile has at most its step of rows"),
        }
    };
}

impl Tile {
    /// # Safety
    /// The pointers must be valid for `rows` rows, and the processor must have AVX-512F.
    #[cfg(target_arch = "x86_64")]
    unsafe fn avx512(&self, rows: usize) {
        // SAFETY: passed on to the caller.
        unsafe { by_rows!(self, avx512_rows, rows, 1 2 3 4 5 6 7 8 9 10 11 12) }
    }

    /// # Safety
    /// The pointers must be valid for `rows` rows, and the processor must have AVX2 and FMA.
    #[cfg(target_arch = "x86_64")]
    unsafe fn avx2(&self, rows: usize) {
        // SAFETY: passed on to the caller.
        unsafe { by_rows!(self, avx2_rows, rows, 1 2 3 4 5 6) }
    }

    /// # Safety
    /// The pointers must be valid for `rows` rows.
    unsafe fn portable(&self, rows: usize) {
        // SAFETY: passed on to the caller.
        unsafe { by_rows!(self, portable_rows, rows, 1 2 3 4) }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    unsafe fn avx512_rows<const R: usize>(&self) {
        use std::arch::x86_64::*;
        // SAFETY: the caller vouches for R rows of x (k floats each) and of the output (`columns` floats each, masked), and for k x 32
        // floats of the panel.
        unsafe {
            let mut acc = [[_mm512_setzero_ps(); 2]; R];
            let mut panel = self.panel;
            for i in 0..self.k {
                let b0 = _mm512_loadu_ps(panel);
                let b1 = _mm512_loadu_ps(panel.add(16));
                panel = panel.add(PANEL);
                for (r, acc) in acc.iter_mut().enumerate() {
                    let a = _mm512_set1_ps(*self.x.add(r * self.x_stride + i));
                    acc[0] = _mm512_fmadd_ps(a, b0, acc[0]);
                    acc[1] = _mm512_fmadd_ps(a, b1, acc[1]);
                }
            }
            let mask = |from: usize| -> __mmask16 {
                let left = self.columns.saturating_sub(from).min(16);
                ((1_u32 << left) - 1) as u16
            };
            let masks = [mask(0), mask(16)];
            for (r, acc) in acc.iter().enumerate() {
                let out = self.out.add(r * self.out_stride);
                for half in 0..2 {
                    let at = out.add(half * 16);
                    let mut value = acc[half];
                    if self.store == Store::Add {
                        value = _mm512_add_ps(_mm512_maskz_loadu_ps(masks[half], at), value);
                    }
                    _mm512_mask_storeu_ps(at, masks[half], value);
                }
            }
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma")]
    unsafe fn avx2_rows<const R: usize>(&self) {
        use std::arch::x86_64::*;
        // SAFETY: as in `avx512_rows`; the results go through `write`, which stores `columns` floats a row.
        unsafe {
            let mut result = [[0.0_f32; PANEL]; R];
            for half in 0..2 {
                let mut acc = [[_mm256_setzero_ps(); 2]; R];
                let mut panel = self.panel.add(half * 16);
                for i in 0..self.k {
                    let b0 = _mm256_loadu_ps(panel);
                    let b1 = _mm256_loadu_ps(panel.add(8));
                    panel = panel.add(PANEL);
                    for (r, acc) in acc.iter_mut().enumerate() {
                        let a = _mm256_set1_ps(*self.x.add(r * self.x_stride + i));
                        acc[0] = _mm256_fmadd_ps(a, b0, acc[0]);
                        acc[1] = _mm256_fmadd_ps(a, b1, acc[1]);
                    }
                }
                for (acc, result) in acc.iter().zip(&mut result) {
                    _mm256_storeu_ps(result.as_mut_ptr().add(half * 16), acc[0]);
                    _mm256_storeu_ps(result.as_mut_ptr().add(half * 16 + 8), acc[1]);
                }
            }
            self.write(&result);
        }
    }

    unsafe fn portable_rows<const R: usize>(&self) {
        // SAFETY: as in `avx2_rows`.
        unsafe {
            let mut acc = [[0.0_f32; PANEL]; R];
            for i in 0..self.k {
                let b = std::slice::from_raw_parts(self.panel.add(i * PANEL), PANEL);
                for (r, acc) in acc.iter_mut().enumerate() {
                    let a = *self.x.add(r * self.x_stride + i);
                    for (acc, b) in acc.iter_mut().zip(b) {
                        *acc = fma::<{ !cfg!(target_arch = "x86_64") }>(a, *b, *acc);
                    }
                }
            }
            self.write(&acc);
        }
    }

    /// # Safety
    /// The output must have R rows of `columns` floats.
    #[inline(always)]
    unsafe fn write<const R: usize>(&self, result: &[[f32; PANEL]; R]) {
        for (r, result) in result.iter().enumerate() {
            // SAFETY: passed on to the caller.
            let out = unsafe { std::slice::from_raw_parts_mut(self.out.add(r * self.out_stride), self.columns) };
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
    /// `out = silu(gate) * up`, where `x` holds gate, then up.
    fn silu_mul(x: &[f32], out: &mut [f32]) = silu_mul_body
}
dispatched! {
    /// Softmax of `scale * scores[..keep]` in place; what comes after is set to 0.
    fn softmax(scores: &mut [f32], keep: usize, scale: f32) = softmax_body
}
dispatched! {
    /// Rotates pairs `(x[i], x[i + half])` by the angles whose cosines and sines are given (rotary embedding, halves layout).
    fn rotate(x: &mut [f32], cos: &[f32], sin: &[f32]) = rotate_body
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

/// e^x to about 1 ulp for x in [-87, 88], 0 below, clamped above: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2].
#[inline(always)]
fn exp<const F: bool>(x: f32) -> f32 {
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

#[inline(always)]
fn silu_mul_body<const F: bool>(x: &[f32], out: &mut [f32]) {
    let (gate, up) = x.split_at(x.len() / 2);
    for ((out, g), u) in out.iter_mut().zip(gate).zip(up) {
        *out = g / (1.0 + exp::<F>(-g)) * u;
    }
}

#[inline(always)]
fn softmax_body<const F: bool>(scores: &mut [f32], keep: usize, scale: f32) {
    let (kept, rest) = scores.split_at_mut(keep);
    rest.fill(0.0);
    let mut tops = [f32::NEG_INFINITY; 16];
    let (chunks, tail) = kept.as_chunks_mut::<16>();
    for chunk in chunks.iter() {
        for i in 0..16 {
            tops[i] = if chunk[i] > tops[i] { chunk[i] } else { tops[i] };
        }
    }
    for (top, s) in tops.iter_mut().zip(tail.iter()) {
        *top = if *s > *top { *s } else { *top };
    }
    let top = tops.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn floats(n: usize, seed: u64) -> Vec<f32> {
        let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
        (0..n)
            .map(|_| {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                (state >> 40) as f32 / (1 << 23) as f32 - 1.0
            })
            .collect()
    }

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
            let view = View { rows: m, width: k, stride: k };
            let mut fused: Option<Vec<f32>> = None;
            for isa in Isa::available() {
                let mut out = vec![1.0_f32; m * n];
                product(isa, &x, view, &panels, n, &mut out, n, Store::Add);
                for r in 0..m {
                    for c in 0..n {
                        let exact: f64 = (0..k).map(|i| f64::from(x[r * k + i]) * f64::from(w[c * k + i])).sum();
                        prop_assert!((f64::from(out[r * n + c]) - 1.0 - exact).abs() < 1e-4);
                    }
                }
                // A row alone has the bits it has among others.
                let mut alone = vec![1.0_f32; n];
                product(isa, &x[(m - 1) * k..], View { rows: 1, ..view }, &panels, n, &mut alone, n, Store::Add);
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
                silu_mul(isa, &both, &mut out);
                for i in 0..n {
                    let g = f64::from(both[i]);
                    prop_assert!((f64::from(out[i]) - g / (1.0 + (-g).exp()) * f64::from(both[n + i])).abs() < 1e-4);
                }
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
