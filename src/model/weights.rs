//! Reading tensors as f32 from GGUF files and from hub directories, one at a time.

use std::collections::HashMap;
use std::fs::File;
use std::io::BufReader;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use candle_core::Device;
use candle_core::quantized::gguf_file;
use half::vec::HalfBitsVecExt;
use rayon::prelude::*;
use safetensors::Dtype;
use safetensors::tensor::Metadata;

use super::ModelError;
use super::ops::Numbers;

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> ModelError + '_ {
    move |source| ModelError::Io { path: path.display().to_string(), source }
}

pub(super) fn checkpoint(path: &Path, reason: impl Into<String>) -> ModelError {
    ModelError::Checkpoint { path: path.display().to_string(), reason: reason.into() }
}

/// Reads the header of a GGUF file.
pub(super) fn gguf_content(path: &Path) -> Result<gguf_file::Content, ModelError> {
    let mut reader = BufReader::new(File::open(path).map_err(io(path))?);
    gguf_file::Content::read(&mut reader).map_err(|e| checkpoint(path, format!("not a usable GGUF file: {e}")))
}

/// The safetensors files of a hub directory, sorted by name: those its index names, else `model.safetensors`, else all there are.
pub(super) fn safetensors_files(dir: &Path) -> Result<Vec<PathBuf>, ModelError> {
    let index = dir.join("model.safetensors.index.json");
    let mut names: Vec<String> = if index.is_file() {
        #[derive(serde::Deserialize)]
        struct Index {
            weight_map: HashMap<String, String>,
        }
        let text = std::fs::read_to_string(&index).map_err(io(&index))?;
        let index: Index = serde_json::from_str(&text).map_err(|e| checkpoint(&index, e.to_string()))?;
        index.weight_map.into_values().collect()
    } else if dir.join("model.safetensors").is_file() {
        vec!["model.safetensors".into()]
    } else {
        let entries = std::fs::read_dir(dir).map_err(io(dir))?;
        entries.filter_map(|e| e.ok()?.file_name().into_string().ok()).filter(|name| name.ends_with(".safetensors")).collect()
    };
    names.sort();
    names.dedup();
    if names.is_empty() {
        return Err(checkpoint(dir, "has no .safetensors file"));
    }
    if let Some(name) = names.iter().find(|n| n.contains('/') || n.contains('\\')) {
        return Err(checkpoint(&index, format!("names a file outside its folder: {name:?}")));
    }
    Ok(names.into_iter().map(|name| dir.join(name)).collect())
}

struct HubTensor {
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    offset: u64,
    bytes: usize,
}

enum Source {
    Gguf {
        content: gguf_file::Content,
        file: File,
        interleaved: Option<[usize; 2]>,
    },
    Hub {
        files: Vec<File>,
        /// By short name.
        tensors: HashMap<String, HubTensor>,
        /// What the names of layers begin with in the files.
        prefix: String,
    },
}

/// An open checkpoint. Tensors go by their hub names without the prefixes that differ between checkpoints
/// (`layers.0.mlp.up_proj.weight`), whatever the file calls them.
pub(super) struct Weights {
    path: PathBuf,
    source: Source,
}

impl Weights {
    /// Opens a GGUF file; `interleaved` gives the heads of queries and keys whose rows lie in the interleaved rotary layout.
    pub(super) fn open_gguf(path: &Path, interleaved: Option<[usize; 2]>) -> Result<Self, ModelError> {
        let content = gguf_content(path)?;
        let file = File::open(path).map_err(io(path))?;
        let source = Source::Gguf { content, file, interleaved };
        Ok(Self { path: path.to_owned(), source })
    }

    pub(super) fn open_hub(dir: &Path) -> Result<Self, ModelError> {
        let (mut files, mut tensors, mut prefix) = (Vec::new(), HashMap::new(), String::new());
        for path in safetensors_files(dir)? {
            let file = File::open(&path).map_err(io(&path))?;
            let length = file.metadata().map_err(io(&path))?.len();
            let mut size = [0; 8];
            file.read_exact_at(&mut size, 0).map_err(|e| checkpoint(&path, format!("truncated: {e}")))?;
            let header = u64::from_le_bytes(size);
            if header > length.saturating_sub(8) || header > 100_000_000 {
                return Err(checkpoint(&path, "truncated, or not a safetensors file (its header is longer than the file)"));
            }
            let mut bytes = vec![0; header as usize];
            file.read_exact_at(&mut bytes, 8).map_err(io(&path))?;
            let metadata: Metadata = serde_json::from_slice(&bytes).map_err(|e| checkpoint(&path, e.to_string()))?;
            for (name, info) in metadata.tensors() {
                let (start, end) = info.data_offsets;
                let offset = 8 + header + start as u64;
                if 8 + header + end as u64 > length {
                    return Err(checkpoint(&path, format!("truncated: tensor {name} ends beyond the file")));
                }
                let tensor = HubTensor { file: files.len(), dtype: info.dtype, shape: info.shape.clone(), offset, bytes: end - start };
                let bare = short(&name);
                if bare.starts_with("layers.") || bare.starts_with("h.") {
                    prefix = name[..name.len() - bare.len()].to_owned();
                }
                tensors.insert(bare.to_owned(), tensor);
            }
            files.push(file);
        }
        Ok(Self { path: dir.to_owned(), source: Source::Hub { files, tensors, prefix } })
    }

    /// Whether the checkpoint has a tensor.
    pub(super) fn has(&self, name: &str) -> bool {
        match &self.source {
            Source::Gguf { content, .. } => gguf_name(name).is_some_and(|n| content.tensor_infos.contains_key(&n)),
            Source::Hub { tensors, .. } => tensors.contains_key(name),
        }
    }

    /// Reads a layer that hub checkpoints hold as `inputs x outputs` (GGUF files do not) as `outputs x inputs`.
    pub(super) fn get_transposed(&self, name: &str, inputs: usize, outputs: usize) -> Result<Vec<f32>, ModelError> {
        if matches!(self.source, Source::Gguf { .. }) {
            return self.get(name, &[outputs, inputs]);
        }
        let values = self.get(name, &[inputs, outputs])?;
        Ok((0..outputs).flat_map(|o| values[o..].iter().step_by(outputs)).copied().collect())
    }

    /// Reads a tensor as row-major f32 and checks its shape.
    pub(super) fn get(&self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let fail = |reason: String| checkpoint(&self.path, reason);
        match &self.source {
            Source::Gguf { content, file, interleaved } => {
                let stored = gguf_name(name).ok_or_else(|| fail(format!("no GGUF name is known for tensor {name}")))?;
                if !content.tensor_infos.contains_key(&stored) {
                    return Err(fail(format!("tensor {stored} ({name}) is missing")));
                }
                let tensor = content
                    .tensor(&mut BufReader::new(file), &stored, &Device::Cpu)
                    .and_then(|t| t.dequantize(&Device::Cpu))
                    .map_err(|e| fail(format!("tensor {stored}: {e}")))?;
                if tensor.dims() != shape {
                    return Err(fail(format!("tensor {stored} has shape {:?}, expected {shape:?}", tensor.dims())));
                }
                let values = tensor.flatten_all().and_then(|t| t.to_vec1::<f32>()).map_err(|e| fail(format!("tensor {stored}: {e}")))?;
                let width = shape.last().copied().filter(|_| shape.len() == 2).unwrap_or(1);
                Ok(match interleaved {
                    Some([heads, _]) if name.contains(".q_proj.") => halves(&values, *heads, width),
                    Some([_, heads]) if name.contains(".k_proj.") => halves(&values, *heads, width),
                    _ => values,
                })
            }
            Source::Hub { .. } => self.get_numbers(name, shape).map(Numbers::into_floats),
        }
    }

    /// Reads a tensor as it is stored, where that is a format of [`Numbers`].
    pub(super) fn get_numbers(&self, name: &str, shape: &[usize]) -> Result<Numbers, ModelError> {
        let Source::Hub { files, tensors, prefix } = &self.source else {
            return self.get(name, shape).map(Numbers::F32);
        };
        let fail = |reason: String| checkpoint(&self.path, reason);
        let tensor = tensors.get(name).ok_or_else(|| fail(format!("tensor {prefix}{name} is missing")))?;
        if tensor.shape != shape {
            return Err(fail(format!("tensor {prefix}{name} has shape {:?}, expected {shape:?}", tensor.shape)));
        }
        let file = &files[tensor.file];
        let failed = |e: std::io::Error| fail(format!("tensor {name}: {e}"));
        match tensor.dtype {
            Dtype::F32 => read(file, tensor, 0.0, f32::from_le_bytes).map(Numbers::F32).map_err(failed),
            Dtype::F16 => read(file, tensor, 0, u16::from_le_bytes).map(|bits| Numbers::F16(bits.reinterpret_into())).map_err(failed),
            Dtype::BF16 => read(file, tensor, 0, u16::from_le_bytes).map(|bits| Numbers::Bf16(bits.reinterpret_into())).map_err(failed),
            other => Err(fail(format!("tensor {prefix}{name} is stored as {other:?}; f32, f16 and bf16 can be read"))),
        }
    }
}

/// Reads numbers of N bytes each, in pieces, on all threads there are.
fn read<T: Copy + Send, const N: usize>(file: &File, tensor: &HubTensor, zero: T, of: fn([u8; N]) -> T) -> std::io::Result<Vec<T>> {
    /// Numbers of a piece.
    const PIECE: usize = 1 << 18;
    // Zeros of a primitive type come from the system, untouched: whoever reads a piece has its pages made.
    let mut out = vec![zero; tensor.bytes / N];
    out.par_chunks_mut(PIECE).enumerate().try_for_each_init(
        || vec![0; PIECE * N],
        |bytes, (piece, out)| {
            let bytes = &mut bytes[..out.len() * N];
            file.read_exact_at(bytes, tensor.offset + (piece * PIECE * N) as u64)?;
            out.iter_mut().zip(bytes.as_chunks::<N>().0).for_each(|(out, bytes)| *out = of(*bytes));
            Ok::<_, std::io::Error>(())
        },
    )?;
    Ok(out)
}

/// The name of a hub tensor without the prefixes of the modules that its model lies in.
fn short(name: &str) -> &str {
    let mut name = name;
    while let Some(rest) = ["model.", "language_model.", "transformer.", "gpt_neox.", "bert."].iter().find_map(|p| name.strip_prefix(p)) {
        name = rest;
    }
    name
}

/// The GGUF name of a tensor of the llama family or of GPT-2.
fn gguf_name(name: &str) -> Option<String> {
    let (module, kind) = name.rsplit_once('.')?;
    let outside = match module {
        "embed_tokens" | "wte" => "token_embd",
        "wpe" => "position_embd",
        "norm" | "ln_f" => "output_norm",
        "lm_head" => "output",
        _ => "",
    };
    if !outside.is_empty() {
        return Some(format!("{outside}.{kind}"));
    }
    let (layer, module) = module.strip_prefix("layers.").or_else(|| module.strip_prefix("h."))?.split_once('.')?;
    let module = match module {
        "input_layernorm" | "ln_1" => "attn_norm",
        "post_attention_layernorm" | "ln_2" => "ffn_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.q_norm" => "attn_q_norm",
        "self_attn.k_norm" => "attn_k_norm",
        "attn.c_attn" => "attn_qkv",
        "self_attn.o_proj" | "attn.c_proj" => "attn_output",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" | "mlp.c_fc" => "ffn_up",
        "mlp.down_proj" | "mlp.c_proj" => "ffn_down",
        _ => return None,
    };
    Some(format!("blk.{layer}.{module}.{kind}"))
}

/// Puts the rows of each head from the interleaved rotary layout of GGUF's llama into the halves layout of hub checkpoints.
fn halves(values: &[f32], heads: usize, width: usize) -> Vec<f32> {
    let rows = values.len() / width;
    let dim = rows / heads;
    let mut out = Vec::with_capacity(values.len());
    for row in 0..rows {
        let (head, within) = (row / dim, row % dim);
        let (part, pair) = (within / (dim / 2), within % (dim / 2));
        let source = head * dim + pair * 2 + part;
        out.extend_from_slice(&values[source * width..][..width]);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefixes_of_modules_go() {
        for name in ["layers.0.w", "model.layers.0.w", "model.language_model.layers.0.w", "language_model.model.layers.0.w"] {
            assert_eq!(short(name), "layers.0.w");
        }
        assert_eq!(short("transformer.h.0.w"), "h.0.w");
        assert_eq!(short("visual.model.w"), "visual.model.w");
    }

    #[test]
    fn interleaved_rows_become_halves() {
        let values: Vec<f32> = (0..8).map(|v| v as f32).collect();
        assert_eq!(halves(&values, 2, 1), [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
    }
}
