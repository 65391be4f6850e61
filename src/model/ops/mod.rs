//! The operations of which architecture files are made. Nothing else knows how weights are stored.
//!
//! All work on row-major `f32` slices on the calling thread, row by row: the bits of a row never depend on the rows beside it.

#[cfg(target_arch = "x86_64")]
mod amx;
mod attention;
mod bf16;
mod delta;
mod device;
mod head;
mod int8;
mod kernels;
mod memory;

use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

use rayon::prelude::*;

pub use attention::{AttentionScratch, AttentionShape, attention};
pub use delta::{DeltaScratch, DeltaShape, ShortConvolution, gated_delta};
pub(super) use device::placed;
pub use device::{Device, Precision};
pub use head::{Head, HeadScratch};
pub use kernels::Activation;

use kernels::{Input, Isa, PANEL, Rows, Store};
use memory::Block;

use super::ModelError;

/// Rows that go through a run of products at once: few enough that their activations stay in the second-level cache.
pub const ROW_TILE: usize = 288;

/// A float buffer that keeps its memory between uses.
#[derive(Debug, Default)]
pub struct Buffer(Block<f32>);

impl Buffer {
    /// The first `len` floats, whatever they hold.
    pub fn get(&mut self, len: usize) -> &mut [f32] {
        self.0.reserve(len);
        &mut self.0[..len]
    }
}

/// Whether a product replaces its output or is added to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Output {
    /// Replace.
    Set,
    /// Add, as a residual connection does.
    Add,
}

/// A linear layer `y = x W^T + b`, its weights packed for the product kernels.
#[derive(Debug)]
pub struct Linear {
    inputs: usize,
    outputs: usize,
    weights: Packed,
    bias: Option<Vec<f32>>,
}

/// Weights in the layout of the fastest product that this processor has.
#[derive(Debug)]
enum Packed {
    Panels(Block<f32>),
    #[cfg(target_arch = "x86_64")]
    Tiles(amx::Weights),
    Bf16(bf16::Weights),
    Int8(int8::Weights),
    Device(device::Weights),
}

/// Where weights come from: writes a row of them; false leaves it as it is, where a packed layer has a row of nothing.
type Row<'a> = &'a (dyn Fn(usize, &mut [f32]) -> bool + Sync);

/// Buffers of products, one set per thread.
#[derive(Default)]
struct ProductScratch {
    packed: Block<f32>,
    pairs: Block<u32>,
    integers: int8::Scratch,
    #[cfg(target_arch = "x86_64")]
    tiles: amx::Scratch,
}

thread_local! {
    static PRODUCT: RefCell<ProductScratch> = RefCell::default();
}

impl Linear {
    /// Packs weights of shape `outputs x inputs`, given as consecutive blocks of rows (so that several layers over one input become
    /// one product), and an optional bias for all outputs. Works on all threads there are. In int8 such a layer is one of bf16: see [`Self::pack_wide`].
    ///
    /// # Errors
    /// [`ModelError::Shape`] if a block is not whole rows or the bias has another length.
    pub fn pack(inputs: usize, blocks: &[Numbers], bias: Option<Vec<f32>>) -> Result<Self, ModelError> {
        let precision = if device::precision() == Precision::Int8 { Precision::Bf16 } else { device::precision() };
        Self::pack_parts(inputs, &blocks.iter().map(Part::whole).collect::<Vec<_>>(), bias, precision)
    }

    /// As [`Self::pack`], for the first layer of a feed-forward one, which in int8 is one of integers. They and the output head are half of all operations
    /// and make an eighth of the error that integers would make everywhere; second layers, whose inputs have the largest outliers, make more than half.
    ///
    /// # Errors
    /// As [`Self::pack`].
    pub fn pack_wide(inputs: usize, blocks: &[Numbers], bias: Option<Vec<f32>>) -> Result<Self, ModelError> {
        Self::pack_parts(inputs, &blocks.iter().map(Part::whole).collect::<Vec<_>>(), bias, device::precision())
    }

    fn pack_parts(inputs: usize, blocks: &[Part<'_>], bias: Option<Vec<f32>>, precision: Precision) -> Result<Self, ModelError> {
        let count: usize = blocks.iter().map(|b| b.range.len()).sum();
        let outputs = count / inputs.max(1);
        let whole = inputs > 0 && blocks.iter().all(|b| b.range.len() % inputs == 0);
        if !whole || bias.as_ref().is_some_and(|b| b.len() != outputs) {
            return Err(ModelError::Shape(format!("a layer of {inputs} inputs got {count} weights or a bias of another size")));
        }
        if let Some(device) = device::place() {
            let weights = Packed::Device(device::Weights::pack(&device, inputs, blocks)?);
            return Ok(Self { inputs, outputs, weights, bias });
        }
        let row = |row: usize, out: &mut [f32]| {
            let mut at = row * inputs;
            for block in blocks {
                if at < block.range.len() {
                    block.numbers.read(block.range.start + at, out);
                    return true;
                }
                at -= block.range.len();
            }
            false
        };
        #[cfg(target_arch = "x86_64")]
        if amx::available() {
            let weights = Packed::Tiles(amx::Weights::pack(precision, inputs, outputs, &row));
            return Ok(Self { inputs, outputs, weights, bias });
        }
        let weights = match precision {
            Precision::F32 => Self::panels(inputs, outputs, &row),
            Precision::Bf16 => Packed::Bf16(bf16::Weights::pack(inputs, outputs, &row)),
            Precision::Int8 => Packed::Int8(int8::Weights::pack(inputs, outputs, &row)),
        };
        Ok(Self { inputs, outputs, weights, bias })
    }

    fn panels(inputs: usize, outputs: usize, row: Row<'_>) -> Packed {
        let mut panels = Block::beside_others(outputs.div_ceil(PANEL) * PANEL * inputs);
        panels.par_chunks_mut(PANEL * inputs).enumerate().for_each_init(
            || vec![0.0; inputs],
            |floats, (p, panel)| {
                for within in (0..PANEL).filter(|within| p * PANEL + within < outputs) {
                    row(p * PANEL + within, floats);
                    panel[within..].iter_mut().step_by(PANEL).zip(floats.iter()).for_each(|(out, v)| *out = *v);
                }
            },
        );
        Packed::Panels(panels)
    }

    /// Whether [`Self::read`] can give these numbers back, if they were packed.
    fn keeps(&self, numbers: &Numbers) -> bool {
        match &self.weights {
            #[cfg(target_arch = "x86_64")]
            Packed::Tiles(weights) => weights.precision() == Precision::Bf16 && matches!(numbers, Numbers::Bf16(_)),
            Packed::Bf16(_) => matches!(numbers, Numbers::Bf16(_)),
            Packed::Panels(_) | Packed::Int8(_) | Packed::Device(_) => false,
        }
    }

    /// The weights of an output, from input `start` on, as the numbers that they were packed from; see [`Self::keeps`].
    fn read(&self, output: usize, start: usize, out: &mut [f32]) {
        match &self.weights {
            #[cfg(target_arch = "x86_64")]
            Packed::Tiles(weights) => weights.read(output, start, out),
            Packed::Bf16(weights) => weights.read(output, start, out),
            // They keep nothing.
            Packed::Panels(_) | Packed::Int8(_) | Packed::Device(_) => {}
        }
    }

    /// Outputs of a row.
    #[must_use]
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Computes all rows of `x` (`rows x inputs`) into `out` (`rows x outputs`).
    ///
    /// # Errors
    /// [`ModelError::Device`] if an accelerator fails.
    pub fn forward(&self, x: &[f32], out: &mut [f32], output: Output) -> Result<(), ModelError> {
        if let Packed::Device(weights) = &self.weights {
            weights.product(x, out, output)?;
            self.add_bias(out);
            return Ok(());
        }
        let (rows, width) = (x.len() / self.inputs, self.inputs);
        let store = if output == Output::Add { Store::Add } else { Store::Set };
        let x = Rows { data: x, rows, width, stride: width };
        PRODUCT.with_borrow_mut(|scratch| match &self.weights {
            #[cfg(target_arch = "x86_64")]
            Packed::Tiles(weights) => amx::product(x, weights, &mut scratch.tiles, out, store),
            Packed::Panels(panels) => {
                kernels::pack_rows(x, &mut scratch.packed);
                let input = Input::Packed { data: &scratch.packed, rows, width };
                kernels::product(Isa::best(), input, panels, self.outputs, out, self.outputs, store);
            }
            Packed::Bf16(weights) => bf16::product(bf16::Way::best(), x, weights, &mut scratch.pairs, out, store),
            Packed::Int8(weights) => int8::product(int8::Way::best(), x, weights, &mut scratch.integers, out, store),
            // Taken above.
            Packed::Device(_) => {}
        });
        self.add_bias(out);
        Ok(())
    }

    fn add_bias(&self, out: &mut [f32]) {
        if let Some(bias) = &self.bias {
            for row in out.chunks_exact_mut(self.outputs) {
                for (value, b) in row.iter_mut().zip(bias) {
                    *value += b;
                }
            }
        }
    }
}

/// A gated feed-forward layer: `y = (activation(x G^T + g) * (x U^T + u)) D^T + d`.
#[derive(Debug)]
pub struct GatedFeedForward {
    inputs: usize,
    activation: Activation,
    gate_up: Linear,
    down: Linear,
    /// Whether gate and up are packed to be one operation with down.
    fused: bool,
}

/// Buffers of feed-forward layers.
#[derive(Debug, Default)]
pub struct FeedForwardScratch {
    wide: Buffer,
    gated: Buffer,
}

impl GatedFeedForward {
    /// Packs the weights of gate and up (`width x inputs` each, with one optional bias for both) and of down (`inputs x width`).
    ///
    /// # Errors
    /// [`ModelError::Shape`] if a block is not whole rows or a bias has another length.
    pub fn pack(
        inputs: usize,
        activation: Activation,
        gate_up: [Numbers; 2],
        gate_up_bias: Option<Vec<f32>>,
        down: Numbers,
        down_bias: Option<Vec<f32>>,
    ) -> Result<Self, ModelError> {
        let width = gate_up[0].len() / inputs.max(1);
        let down = Linear::pack(width, &[down], down_bias)?;
        #[cfg(target_arch = "x86_64")]
        if amx::available() && device::place().is_none() && amx::fuses(device::precision(), inputs) {
            let row = |layer: usize, row: usize, out: &mut [f32]| {
                if row < width {
                    gate_up[layer].read(row * inputs, out);
                }
                row < width
            };
            let weights = Packed::Tiles(amx::Weights::pack_gated(device::precision(), inputs, width, &row));
            let gate_up = Linear { inputs, outputs: 2 * width, weights, bias: gate_up_bias };
            return Ok(Self { inputs, activation, gate_up, down, fused: true });
        }
        Ok(Self { inputs, activation, gate_up: Linear::pack_wide(inputs, &gate_up, gate_up_bias)?, down, fused: false })
    }

    /// Adds the layer's output for each row of `x` to `out` (both `rows x inputs`).
    ///
    /// # Errors
    /// [`ModelError::Device`] if an accelerator fails.
    pub fn add(&self, x: &[f32], out: &mut [f32], scratch: &mut FeedForwardScratch) -> Result<(), ModelError> {
        #[cfg(target_arch = "x86_64")]
        if let (true, Packed::Tiles(gate_up), Packed::Tiles(down)) = (self.fused, &self.gate_up.weights, &self.down.weights) {
            let x = Rows { data: x, rows: x.len() / self.inputs, width: self.inputs, stride: self.inputs };
            let bias = self.gate_up.bias.as_deref();
            PRODUCT.with_borrow_mut(|product| amx::gated(x, self.activation, gate_up, bias, down, &mut product.tiles, out));
            self.down.add_bias(out);
            return Ok(());
        }
        if let (Packed::Device(gate_up), Packed::Device(down)) = (&self.gate_up.weights, &self.down.weights) {
            gate_up.feed_forward(down, self.gate_up.bias.as_deref(), self.activation, true, x, out)?;
            self.down.add_bias(out);
            return Ok(());
        }
        let width = self.down.inputs;
        for (x, out) in x.chunks(ROW_TILE * self.inputs).zip(out.chunks_mut(ROW_TILE * self.inputs)) {
            let rows = x.len() / self.inputs;
            let (wide, gated) = (scratch.wide.get(rows * 2 * width), scratch.gated.get(rows * width));
            self.gate_up.forward(x, wide, Output::Set)?;
            for (x, out) in wide.chunks_exact(2 * width).zip(gated.chunks_exact_mut(width)) {
                kernels::gate(Isa::best(), self.activation, x, out);
            }
            self.down.forward(gated, out, Output::Add)?;
        }
        Ok(())
    }
}

/// A feed-forward layer: `y = activation(x U^T + u) D^T + d`.
#[derive(Debug)]
pub struct FeedForward {
    activation: Activation,
    up: Linear,
    down: Linear,
}

impl FeedForward {
    /// A layer of two linear ones.
    #[must_use]
    pub fn new(activation: Activation, up: Linear, down: Linear) -> Self {
        Self { activation, up, down }
    }

    /// Adds the layer's output for each row of `x` to `out` (both `rows x inputs`).
    ///
    /// # Errors
    /// [`ModelError::Device`] if an accelerator fails.
    pub fn add(&self, x: &[f32], out: &mut [f32], scratch: &mut FeedForwardScratch) -> Result<(), ModelError> {
        if let (Packed::Device(up), Packed::Device(down)) = (&self.up.weights, &self.down.weights) {
            up.feed_forward(down, self.up.bias.as_deref(), self.activation, false, x, out)?;
            self.down.add_bias(out);
            return Ok(());
        }
        let inputs = self.up.inputs;
        for (x, out) in x.chunks(ROW_TILE * inputs).zip(out.chunks_mut(ROW_TILE * inputs)) {
            let wide = scratch.wide.get(x.len() / inputs * self.up.outputs);
            self.up.forward(x, wide, Output::Set)?;
            kernels::activate(Isa::best(), self.activation, wide);
            self.down.forward(wide, out, Output::Add)?;
        }
        Ok(())
    }
}

/// Some of the numbers there are.
struct Part<'a> {
    numbers: &'a Numbers,
    range: Range<usize>,
}

impl<'a> Part<'a> {
    fn whole(numbers: &'a Numbers) -> Self {
        Self { numbers, range: 0..numbers.len() }
    }

    fn floats(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.range.len()];
        self.numbers.read(self.range.start, &mut out);
        out
    }
}

/// Numbers as a checkpoint stores them.
#[derive(Debug, Clone)]
pub enum Numbers {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// IEEE half precision.
    F16(Vec<half::f16>),
    /// The upper half of 32-bit floats.
    Bf16(Vec<half::bf16>),
}

impl From<Vec<f32>> for Numbers {
    fn from(values: Vec<f32>) -> Self {
        Self::F32(values)
    }
}

impl Numbers {
    /// All of them as floats.
    #[must_use]
    pub fn into_floats(self) -> Vec<f32> {
        match self {
            Self::F32(values) => values,
            other => Part::whole(&other).floats(),
        }
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        match self {
            Self::F32(v) => v.len(),
            Self::F16(v) => v.len(),
            Self::Bf16(v) => v.len(),
        }
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Writes `out.len()` numbers from `start` on.
    fn read(&self, start: usize, out: &mut [f32]) {
        let range = start..start + out.len();
        match self {
            Self::F32(v) => out.copy_from_slice(&v[range]),
            Self::F16(v) => out.iter_mut().zip(&v[range]).for_each(|(out, v)| *out = v.to_f32()),
            Self::Bf16(v) => out.iter_mut().zip(&v[range]).for_each(|(out, v)| *out = v.to_f32()),
        }
    }
}

/// Token embeddings: `vocab x hidden`.
#[derive(Debug, Clone)]
pub struct Embedding {
    hidden: usize,
    vocab: usize,
    table: Table,
    scale: f32,
}

/// Where embeddings lie.
#[derive(Debug, Clone)]
enum Table {
    Own(Numbers),
    /// In an output head that keeps its numbers.
    Head(Arc<Head>),
}

impl Embedding {
    /// Takes a table of rows of `hidden` numbers as they are stored.
    #[must_use]
    pub fn new(hidden: usize, table: impl Into<Numbers>) -> Self {
        let table = table.into();
        Self { hidden, vocab: table.len() / hidden.max(1), table: Table::Own(table), scale: 1.0 }
    }

    /// The embeddings that a head was packed of: there alone, where it has them as they are stored.
    #[must_use]
    pub fn tied(hidden: usize, table: Numbers, head: &Arc<Head>) -> Self {
        if head.keeps(&table) {
            return Self { hidden, vocab: head.vocab(), table: Table::Head(Arc::clone(head)), scale: 1.0 };
        }
        Self::new(hidden, table)
    }

    /// All embeddings times a number.
    #[must_use]
    pub fn scaled(self, scale: f32) -> Self {
        Self { scale, ..self }
    }

    /// Writes the embedding of each id into a row of `out`.
    ///
    /// # Errors
    /// [`ModelError::TokenId`] for an id outside the table.
    pub fn forward(&self, ids: &[u32], out: &mut [f32]) -> Result<(), ModelError> {
        self.forward_part(ids, 0, out)
    }

    /// Writes a part of the embedding of each id, from number `start` on, into a row of `out`: as much as a row takes.
    ///
    /// # Errors
    /// [`ModelError::TokenId`] for an id outside the table.
    pub fn forward_part(&self, ids: &[u32], start: usize, out: &mut [f32]) -> Result<(), ModelError> {
        let (vocab, width) = (self.vocab, out.len() / ids.len().max(1));
        for (row, &id) in out.chunks_exact_mut(width.max(1)).zip(ids) {
            if id as usize >= vocab {
                return Err(ModelError::TokenId { id, vocab });
            }
            match &self.table {
                Table::Own(table) => table.read(id as usize * self.hidden + start, row),
                Table::Head(head) => head.read(id as usize, start, row),
            }
            if self.scale != 1.0 {
                row.iter_mut().for_each(|v| *v *= self.scale);
            }
        }
        Ok(())
    }
}

/// RMS normalisation: `x / sqrt(mean(x^2) + eps) * weight`.
#[derive(Debug, Clone)]
pub struct RmsNorm {
    weight: Vec<f32>,
    eps: f32,
}

impl RmsNorm {
    /// A norm with one weight per feature.
    #[must_use]
    pub fn new(weight: Vec<f32>, eps: f32) -> Self {
        Self { weight, eps }
    }

    /// Normalises each row of `x` into `out`.
    pub fn forward(&self, x: &[f32], out: &mut [f32]) {
        let width = self.weight.len();
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            kernels::rms_norm(Isa::best(), x, &self.weight, self.eps, out);
        }
    }

    /// Normalises each run of as many numbers as there are weights in place, such as the heads of a row.
    pub fn in_place(&self, x: &mut [f32]) {
        for x in x.chunks_exact_mut(self.weight.len()) {
            kernels::rms_norm_in_place(Isa::best(), x, &self.weight, self.eps);
        }
    }
}

/// Layer normalisation: `(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias`.
#[derive(Debug, Clone)]
pub struct LayerNorm {
    weight: Vec<f32>,
    bias: Vec<f32>,
    eps: f32,
}

impl LayerNorm {
    /// A norm with one weight and one bias per feature.
    #[must_use]
    pub fn new(weight: Vec<f32>, bias: Vec<f32>, eps: f32) -> Self {
        Self { weight, bias, eps }
    }

    /// Normalises each row of `x` into `out`.
    pub fn forward(&self, x: &[f32], out: &mut [f32]) {
        let width = self.weight.len();
        for (x, out) in x.chunks_exact(width).zip(out.chunks_exact_mut(width)) {
            kernels::layer_norm(Isa::best(), x, &self.weight, &self.bias, self.eps, out);
        }
    }
}

/// `x *= sigmoid(gate)`.
pub fn mul_sigmoid(gate: &[f32], x: &mut [f32]) {
    kernels::mul_gate(Isa::best(), None, gate, x);
}

/// `x *= activation(gate)`.
pub fn mul_activated(activation: Activation, gate: &[f32], x: &mut [f32]) {
    kernels::mul_gate(Isa::best(), Some(activation), gate, x);
}

/// Cosine of two vectors, in [-1, 1] up to rounding; each norm is at least 1e-8, as in PyTorch.
#[must_use]
pub fn cosine(a: &[f32], b: &[f32]) -> f64 {
    let isa = Isa::best();
    let norm = |v: &[f32]| f64::from(kernels::dot(isa, v, v)).sqrt().max(1e-8);
    f64::from(kernels::dot(isa, a, b)) / (norm(a) * norm(b))
}

/// How a checkpoint stretches its rotary frequencies.
#[derive(Debug, Clone, PartialEq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RotaryScaling {
    /// Not at all.
    None,
    /// Every frequency divided by a factor.
    Linear(f32),
    /// Llama 3's: low frequencies divided by a factor, high ones kept, smooth between.
    Llama3 {
        /// What low frequencies are divided by.
        factor: f32,
        /// Wavelengths above `original_context / low` are low frequencies.
        low: f32,
        /// Wavelengths below `original_context / high` are high frequencies.
        high: f32,
        /// Context length of the first training.
        original_context: f32,
    },
    /// Each frequency divided by a factor of its own.
    PerFrequency(Vec<f32>),
}

impl RotaryScaling {
    /// Frequencies of a rotary embedding over `dims` numbers of a head: `theta^(-2i / dims)`, stretched.
    #[must_use]
    pub fn frequencies(&self, dims: usize, theta: f32) -> Vec<f32> {
        let stretched = |i: usize| {
            let plain = 1.0 / theta.powf(2.0 * i as f32 / dims as f32);
            match self {
                Self::None => plain,
                Self::Linear(factor) => plain / factor,
                Self::PerFrequency(factors) => plain / factors.get(i).copied().unwrap_or(1.0),
                Self::Llama3 { factor, low, high, original_context } => {
                    let wavelength = 2.0 * std::f32::consts::PI / plain;
                    let smooth = ((original_context / wavelength - low) / (high - low)).clamp(0.0, 1.0);
                    (1.0 - smooth) * plain / factor + smooth * plain
                }
            }
        };
        (0..dims / 2).map(stretched).collect()
    }
}

/// Rotary position embedding in the halves layout, tables in f32 for every position that can occur.
#[derive(Debug, Clone)]
pub struct Rotary {
    head_dim: usize,
    half: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl Rotary {
    /// Tables for `positions` positions of heads of `head_dim` numbers, of which the first two per frequency are rotated.
    #[must_use]
    pub fn new(head_dim: usize, frequencies: &[f32], positions: usize) -> Self {
        let angles = (0..positions).flat_map(|p| frequencies.iter().map(move |f| f64::from(p as f32 * f)));
        let (sin, cos) = angles.map(f64::sin_cos).map(|(s, c)| (s as f32, c as f32)).unzip();
        Self { head_dim, half: frequencies.len(), cos, sin }
    }

    /// Positions that the tables hold.
    #[must_use]
    pub fn positions(&self) -> usize {
        self.cos.len() / self.half.max(1)
    }

    /// Rotates the first `heads` heads of a row at `position`.
    pub fn forward(&self, row: &mut [f32], heads: usize, position: u32) {
        let at = position as usize * self.half;
        let (cos, sin) = (&self.cos[at..at + self.half], &self.sin[at..at + self.half]);
        for head in row.chunks_exact_mut(self.head_dim).take(heads) {
            kernels::rotate(Isa::best(), &mut head[..2 * self.half], cos, sin);
        }
    }
}

/// A test's rows of weights.
#[cfg(test)]
fn of(k: usize, weights: &[f32]) -> impl Fn(usize, &mut [f32]) -> bool + Sync + '_ {
    move |row, out| {
        out.copy_from_slice(&weights[row * k..][..k]);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::kernels::floats;
    use super::*;

    #[test]
    fn gated_layers_match_f64_on_ragged_shapes_and_rows_are_independent() {
        // More inputs and a wider layer than go through the tile unit in one go, and shapes that fill no tile.
        for (inputs, width, rows) in [(40, 50, 70), (33, 900, 5), (1600, 17, 33), (16, 16, 1), (70, 1700, 40)] {
            let scaled = |n: usize, seed: u64| floats(n, seed).into_iter().map(|v| v * 0.2).collect::<Vec<f32>>();
            let (gate, up, down) = (scaled(width * inputs, 1), scaled(width * inputs, 2), scaled(width * inputs, 3));
            let (x, bias, down_bias) = (scaled(rows * inputs, 4), scaled(2 * width, 5), scaled(inputs, 6));
            for activation in [Activation::Silu, Activation::GeluTanh] {
                let layer = GatedFeedForward::pack(
                    inputs,
                    activation,
                    [gate.clone().into(), up.clone().into()],
                    Some(bias.clone()),
                    down.clone().into(),
                    Some(down_bias.clone()),
                );
                // The same layer as processors without a tile unit have it.
                let panels = |inputs: usize, weights: &[f32], bias: &[f32]| {
                    let outputs = weights.len() / inputs;
                    let packed = Linear::panels(inputs, outputs, &of(inputs, weights));
                    Linear { inputs, outputs, weights: packed, bias: Some(bias.to_vec()) }
                };
                let gate_up = panels(inputs, &[gate.clone(), up.clone()].concat(), &bias);
                let plain = GatedFeedForward { inputs, activation, gate_up, down: panels(width, &down, &down_bias), fused: false };
                // And as an accelerator runs it, on candle's own processor.
                let there = placed(Some(candle_core::Device::Cpu), Precision::F32, || {
                    let gate_up = [gate.clone().into(), up.clone().into()];
                    GatedFeedForward::pack(inputs, activation, gate_up, Some(bias.clone()), down.clone().into(), Some(down_bias.clone()))
                });
                let [rounded, integers] = [Precision::Bf16, Precision::Int8].map(|precision| {
                    placed(None, precision, || {
                        let gate_up = [gate.clone().into(), up.clone().into()];
                        GatedFeedForward::pack(
                            inputs,
                            activation,
                            gate_up,
                            Some(bias.clone()),
                            down.clone().into(),
                            Some(down_bias.clone()),
                        )
                        .unwrap()
                    })
                });
                let all = [(layer.unwrap(), 2e-5), (plain, 2e-5), (there.unwrap(), 2e-5), (rounded, 2e-2), (integers, 4e-2)];
                for (layer, off) in all {
                    let mut scratch = FeedForwardScratch::default();
                    let mut out = vec![1.0; rows * inputs];
                    layer.add(&x, &mut out, &mut scratch).unwrap();
                    for r in [0, rows / 2, rows - 1] {
                        let x = &x[r * inputs..][..inputs];
                        let product = |w: &[f32], x: &[f64]| w.iter().zip(x).map(|(w, x)| f64::from(*w) * x).sum::<f64>();
                        let wide: Vec<f64> = x.iter().map(|v| f64::from(*v)).collect();
                        let inner: Vec<f64> = (0..width)
                            .map(|j| {
                                let g = product(&gate[j * inputs..][..inputs], &wide) + f64::from(bias[j]);
                                let u = product(&up[j * inputs..][..inputs], &wide) + f64::from(bias[width + j]);
                                let tanh = ((2.0 / std::f64::consts::PI).sqrt() * (g + 0.044_715 * g.powi(3))).tanh();
                                u * if activation == Activation::Silu { g / (1.0 + (-g).exp()) } else { 0.5 * g * (1.0 + tanh) }
                            })
                            .collect();
                        for c in [0, inputs / 2, inputs - 1] {
                            let exact = 1.0 + f64::from(down_bias[c]) + product(&down[c * width..][..width], &inner);
                            assert!((f64::from(out[r * inputs + c]) - exact).abs() < off, "{inputs} {width} {r} {c}");
                        }
                        let mut alone = vec![1.0; inputs];
                        layer.add(x, &mut alone, &mut scratch).unwrap();
                        assert!(alone == out[r * inputs..][..inputs]);
                    }
                }
            }
        }
    }
}
