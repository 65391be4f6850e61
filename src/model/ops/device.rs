//! Products on an accelerator, by candle. What is not a product stays on the processor.
//!
//! Rows go there in blocks of one size, the last one filled up: the library behind a product chooses its kernel by the shape, and so the bits of a row
//! depend on nothing beside it.

use std::cell::RefCell;
use std::str::FromStr;

use candle_core::Tensor;

use super::{Activation, Output, Part};
use crate::model::ModelError;

/// Rows of every product.
const ROWS: usize = 1024;

/// Where products run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Device {
    /// This processor, on kernels of our own.
    Cpu,
    /// An NVIDIA card, by number (cargo feature `cuda`).
    Cuda(usize),
    /// Apple's graphics processor (cargo feature `metal`).
    Metal,
}

impl FromStr for Device {
    type Err = String;

    fn from_str(word: &str) -> Result<Self, String> {
        let (device, feature, built) = match word.split_once(':') {
            None if word == "cpu" => return Ok(Self::Cpu),
            None if word == "metal" => (Self::Metal, "metal", cfg!(feature = "metal")),
            None if word == "cuda" => (Self::Cuda(0), "cuda", cfg!(feature = "cuda")),
            Some(("cuda", number)) if number.parse::<usize>().is_ok() => {
                (Self::Cuda(number.parse().unwrap_or_default()), "cuda", cfg!(feature = "cuda"))
            }
            _ => return Err(format!("{word:?} is none of \"cpu\", \"cuda:N\", \"metal\"")),
        };
        if built { Ok(device) } else { Err(format!("{word:?} is not part of this build; build with --features {feature}, or use \"cpu\"")) }
    }
}

impl Device {
    /// Its kind, which is part of the score key.
    #[must_use]
    pub fn class(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Cuda(_) => "cuda",
            Self::Metal => "metal",
        }
    }

    /// Opens an accelerator; none for the processor.
    pub(in crate::model) fn open(self) -> Result<Option<candle_core::Device>, ModelError> {
        match self {
            Self::Cpu => Ok(None),
            Self::Cuda(number) => candle_core::Device::new_cuda(number).map(Some).map_err(failed),
            Self::Metal => candle_core::Device::new_metal(0).map(Some).map_err(failed),
        }
    }
}

pub(super) fn failed(error: candle_core::Error) -> ModelError {
    ModelError::Device(error.to_string())
}

/// What products are computed with. Sums, norms, attention and everything between layers are 32-bit floats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Precision {
    /// 32-bit floats.
    #[default]
    F32,
    /// Weights and inputs of linear layers rounded to bf16, the upper half of a float.
    Bf16,
    /// As `Bf16`, but for the first layers of feed-forward ones and the output head: their weights and inputs are rotated and rounded to 8-bit integers.
    Int8,
}

impl Precision {
    /// Its name, which is part of the score key.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::Int8 => "int8",
        }
    }
}

thread_local! {
    static PLACE: RefCell<(Option<candle_core::Device>, Precision)> = const { RefCell::new((None, Precision::F32)) };
}

/// Runs `load`, whose layers then lie on `device` (`None` is the processor) and multiply in a precision.
pub(in crate::model) fn placed<T>(device: Option<candle_core::Device>, precision: Precision, load: impl FnOnce() -> T) -> T {
    let before = PLACE.replace((device, precision));
    let out = load();
    PLACE.set(before);
    out
}

/// Where layers that are packed now shall lie, if not here.
pub(super) fn place() -> Option<candle_core::Device> {
    PLACE.with_borrow(|place| place.0.clone())
}

/// What layers that are packed now shall multiply in.
pub(super) fn precision() -> Precision {
    PLACE.with_borrow(|place| place.1)
}

/// Weights on an accelerator, `inputs x outputs`.
#[derive(Debug)]
pub(super) struct Weights(Tensor);

impl Weights {
    pub(super) fn pack(device: &candle_core::Device, inputs: usize, blocks: &[Part<'_>]) -> Result<Self, ModelError> {
        let rows: Vec<Tensor> = blocks
            .iter()
            .map(|block| Tensor::from_vec(block.floats(), (block.range.len() / inputs, inputs), device))
            .collect::<candle_core::Result<_>>()
            .map_err(failed)?;
        Tensor::cat(&rows, 0).and_then(|w| w.t()?.contiguous()).map(Self).map_err(failed)
    }

    /// `x W^T` for all rows of `x`, which `after` may go on with while the rows are there.
    fn run(
        &self,
        x: &[f32],
        out: &mut [f32],
        output: Output,
        after: impl Fn(Tensor) -> candle_core::Result<Tensor>,
    ) -> candle_core::Result<()> {
        let inputs = self.0.dim(0)?;
        let outputs = out.len() / (x.len() / inputs).max(1);
        let mut block = vec![0.0; ROWS * inputs];
        for (x, out) in x.chunks(ROWS * inputs).zip(out.chunks_mut(ROWS * outputs)) {
            block[..x.len()].copy_from_slice(x);
            block[x.len()..].fill(0.0);
            let there = Tensor::from_slice(&block, (ROWS, inputs), self.0.device())?;
            let found = after(there.matmul(&self.0)?)?.narrow(0, 0, out.len() / outputs)?.flatten_all()?.to_vec1::<f32>()?;
            match output {
                Output::Set => out.copy_from_slice(&found),
                Output::Add => out.iter_mut().zip(&found).for_each(|(out, found)| *out += found),
            }
        }
        Ok(())
    }

    pub(super) fn product(&self, x: &[f32], out: &mut [f32], output: Output) -> Result<(), ModelError> {
        self.run(x, out, output, Ok).map_err(failed)
    }

    /// A feed-forward layer, gated where `gated`, in one stay on the accelerator: adds to `out`.
    pub(super) fn feed_forward(
        &self,
        down: &Self,
        bias: Option<&[f32]>,
        activation: Activation,
        gated: bool,
        x: &[f32],
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        let after = |wide: Tensor| {
            let wide = match bias {
                Some(bias) => wide.broadcast_add(&Tensor::from_slice(bias, bias.len(), wide.device())?)?,
                None => wide,
            };
            let activated = |x: &Tensor| match activation {
                Activation::Silu => x.silu(),
                Activation::Gelu => x.gelu_erf(),
                Activation::GeluTanh => x.gelu(),
            };
            let width = wide.dim(1)? / 2;
            let inner = if gated {
                (activated(&wide.narrow(1, 0, width)?.contiguous()?)? * wide.narrow(1, width, width)?)?
            } else {
                activated(&wide)?
            };
            inner.matmul(&down.0)
        };
        self.run(x, out, Output::Add, after).map_err(failed)
    }
}
