//! Reading tensors as f32 from GGUF files and from hub directories, one at a time.

use std::collections::HashMap;
use std::fs::File;
use std::io::BufReader;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use candle_core::Device;
use candle_core::quantized::gguf_file;
use safetensors::Dtype;
use safetensors::tensor::Metadata;

use super::ModelError;
use super::llama::LlamaConfig;
use super::ops::RotaryScaling;

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
    Gguf { content: gguf_file::Content, reader: BufReader<File>, heads: usize, kv_heads: usize },
    Hub { files: Vec<File>, tensors: HashMap<String, HubTensor> },
}

/// An open checkpoint. Tensors go by their hub names (`model.layers.0.mlp.up_proj.weight`), whatever the file calls them.
pub(super) struct Weights {
    path: PathBuf,
    source: Source,
}

impl Weights {
    pub(super) fn open_gguf(path: &Path, config: &LlamaConfig) -> Result<Self, ModelError> {
        let content = gguf_content(path)?;
        let reader = BufReader::new(File::open(path).map_err(io(path))?);
        let source = Source::Gguf { content, reader, heads: config.heads, kv_heads: config.kv_heads };
        Ok(Self { path: path.to_owned(), source })
    }

    pub(super) fn open_hub(dir: &Path) -> Result<Self, ModelError> {
        let (mut files, mut tensors) = (Vec::new(), HashMap::new());
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
                tensors.insert(name, tensor);
            }
            files.push(file);
        }
        Ok(Self { path: dir.to_owned(), source: Source::Hub { files, tensors } })
    }

    /// Whether the checkpoint has a tensor.
    pub(super) fn has(&self, name: &str) -> bool {
        match &self.source {
            Source::Gguf { content, .. } => gguf_name(name).is_some_and(|n| content.tensor_infos.contains_key(&n)),
            Source::Hub { tensors, .. } => hub_tensor(tensors, name).is_some(),
        }
    }

    /// Reads a tensor as row-major f32 and checks its shape.
    pub(super) fn get(&mut self, name: &str, shape: &[usize]) -> Result<Vec<f32>, ModelError> {
        let fail = |reason: String| checkpoint(&self.path, reason);
        match &mut self.source {
            Source::Gguf { content, reader, heads, kv_heads } => {
                let stored = gguf_name(name).ok_or_else(|| fail(format!("no GGUF name is known for tensor {name}")))?;
                if !content.tensor_infos.contains_key(&stored) {
                    return Err(fail(format!("tensor {stored} ({name}) is missing")));
                }
                let tensor = content
                    .tensor(reader, &stored, &Device::Cpu)
                    .and_then(|t| t.dequantize(&Device::Cpu))
                    .map_err(|e| fail(format!("tensor {stored}: {e}")))?;
                if tensor.dims() != shape {
                    return Err(fail(format!("tensor {stored} has shape {:?}, expected {shape:?}", tensor.dims())));
                }
                let values = tensor.flatten_all().and_then(|t| t.to_vec1::<f32>()).map_err(|e| fail(format!("tensor {stored}: {e}")))?;
                let width = shape.last().copied().filter(|_| shape.len() == 2).unwrap_or(1);
                Ok(if name.contains(".q_proj.") {
                    halves(&values, *heads, width)
                } else if name.contains(".k_proj.") {
                    halves(&values, *kv_heads, width)
                } else {
                    values
                })
            }
            Source::Hub { files, tensors } => {
                let tensor = hub_tensor(tensors, name).ok_or_else(|| fail(format!("tensor {name} is missing")))?;
                if tensor.shape != shape {
                    return Err(fail(format!("tensor {name} has shape {:?}, expected {shape:?}", tensor.shape)));
                }
                let mut bytes = vec![0; tensor.bytes];
                files[tensor.file].read_exact_at(&mut bytes, tensor.offset).map_err(|e| fail(format!("tensor {name}: {e}")))?;
                let pairs = || bytes.as_chunks::<2>().0.iter();
                match tensor.dtype {
                    Dtype::F32 => Ok(bytes.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()),
                    Dtype::F16 => Ok(pairs().map(|b| half::f16::from_le_bytes(*b).to_f32()).collect()),
                    Dtype::BF16 => Ok(pairs().map(|b| half::bf16::from_le_bytes(*b).to_f32()).collect()),
                    other => Err(fail(format!("tensor {name} is stored as {other:?}; f32, f16 and bf16 can be read"))),
                }
            }
        }
    }
}

/// Finds a tensor with or without the `model.` prefix.
fn hub_tensor<'a>(tensors: &'a HashMap<String, HubTensor>, name: &str) -> Option<&'a HubTensor> {
    tensors.get(name).or_else(|| tensors.get(name.strip_prefix("model.")?))
}

/// The GGUF name of a tensor of the llama family.
fn gguf_name(name: &str) -> Option<String> {
    match name {
        "model.embed_tokens.weight" => return Some("token_embd.weight".into()),
        "model.norm.weight" => return Some("output_norm.weight".into()),
        _ => {}
    }
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let (module, kind) = rest.rsplit_once('.')?;
    let module = match module {
        "input_layernorm" => "attn_norm",
        "post_attention_layernorm" => "ffn_norm",
        "self_attn.q_proj" => "attn_q",
        "self_attn.k_proj" => "attn_k",
        "self_attn.v_proj" => "attn_v",
        "self_attn.o_proj" => "attn_output",
        "mlp.gate_proj" => "ffn_gate",
        "mlp.up_proj" => "ffn_up",
        "mlp.down_proj" => "ffn_down",
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

/// Reads a llama configuration from GGUF metadata.
pub(super) fn gguf_config(path: &Path, content: &gguf_file::Content) -> Result<LlamaConfig, ModelError> {
    let get = |key: &str| content.metadata.get(key);
    let architecture = get("general.architecture").and_then(|v| v.to_string().ok()).map_or("", String::as_str);
    if architecture != "llama" {
        return Err(checkpoint(path, format!("architecture {architecture:?} is not supported (supported: llama)")));
    }
    let number = |key: &str| -> Option<u64> {
        let value = get(&format!("llama.{key}"))?;
        value.to_u64().ok().or_else(|| value.to_u32().ok().map(u64::from)).or_else(|| value.to_i32().ok().map(|v| v as u64))
    };
    let needed = |key: &str| -> Result<usize, ModelError> {
        number(key).map(|v| v as usize).ok_or_else(|| checkpoint(path, format!("metadata key llama.{key} is missing")))
    };
    let float = |key: &str| get(&format!("llama.{key}")).and_then(|v| v.to_f32().ok());
    let (hidden, heads) = (needed("embedding_length")?, needed("attention.head_count")?);
    let vocab = match content.tensor_infos.get("token_embd.weight") {
        Some(info) => info.shape.dims().first().copied().unwrap_or(0),
        None => return Err(checkpoint(path, "tensor token_embd.weight is missing")),
    };
    let scaling = match get("llama.rope.scaling.type").and_then(|v| v.to_string().ok()).map(String::as_str) {
        None | Some("none") => RotaryScaling::None,
        Some("linear") => RotaryScaling::Linear(float("rope.scaling.factor").unwrap_or(1.0)),
        Some(other) => {
            return Err(checkpoint(path, format!("rope scaling {other:?} is not supported (none, linear)")));
        }
    };
    let scaling = match content.tensor_infos.contains_key("rope_freqs.weight") {
        true => {
            let mut reader = BufReader::new(File::open(path).map_err(io(path))?);
            let factors = content
                .tensor(&mut reader, "rope_freqs.weight", &Device::Cpu)
                .and_then(|t| t.dequantize(&Device::Cpu)?.flatten_all()?.to_vec1::<f32>())
                .map_err(|e| checkpoint(path, format!("tensor rope_freqs.weight: {e}")))?;
            RotaryScaling::PerFrequency(factors)
        }
        false => scaling,
    };
    let config = LlamaConfig {
        hidden,
        feed_forward: needed("feed_forward_length")?,
        layers: needed("block_count")?,
        heads,
        kv_heads: number("attention.head_count_kv").map_or(heads, |v| v as usize),
        head_dim: number("attention.key_length").map_or(hidden / heads.max(1), |v| v as usize),
        vocab,
        context: needed("context_length")?,
        eps: float("attention.layer_norm_rms_epsilon").unwrap_or(1e-5),
        theta: float("rope.freq_base").unwrap_or(10_000.0),
        scaling,
    };
    check(path, &config)?;
    Ok(config)
}

/// Reads a llama configuration from the text of a `config.json`.
pub(super) fn hub_config(path: &Path, text: &str) -> Result<LlamaConfig, ModelError> {
    #[derive(serde::Deserialize)]
    struct Raw {
        model_type: Option<String>,
        hidden_size: usize,
        intermediate_size: usize,
        num_hidden_layers: usize,
        num_attention_heads: usize,
        num_key_value_heads: Option<usize>,
        head_dim: Option<usize>,
        vocab_size: usize,
        max_position_embeddings: Option<usize>,
        rms_norm_eps: Option<f32>,
        hidden_act: Option<String>,
        rope_theta: Option<f32>,
        rope_scaling: Option<Rope>,
        rope_parameters: Option<Rope>,
    }
    #[derive(serde::Deserialize)]
    struct Rope {
        rope_theta: Option<f32>,
        #[serde(alias = "type")]
        rope_type: Option<String>,
        factor: Option<f32>,
        low_freq_factor: Option<f32>,
        high_freq_factor: Option<f32>,
        original_max_position_embeddings: Option<f32>,
    }
    let fail = |reason: String| checkpoint(path, reason);
    let value: serde_json::Value = serde_json::from_str(text).map_err(|e| fail(e.to_string()))?;
    let kind = value.get("model_type").and_then(|v| v.as_str()).unwrap_or("");
    if kind != "llama" {
        return Err(fail(format!("model_type {kind:?} is not supported (supported: llama)")));
    }
    let raw: Raw = serde_json::from_value(value).map_err(|e| fail(e.to_string()))?;
    let _ = raw.model_type;
    if let Some(act) = raw.hidden_act.as_deref().filter(|a| *a != "silu") {
        return Err(fail(format!("hidden_act {act:?} is not supported (supported: silu)")));
    }
    let rope = raw.rope_parameters.as_ref().or(raw.rope_scaling.as_ref());
    let factor = |r: &Rope| r.factor.ok_or_else(|| fail("rope scaling without a factor".into()));
    let scaling = match rope.and_then(|r| Some((r, r.rope_type.as_deref()?))) {
        None | Some((_, "default")) => RotaryScaling::None,
        Some((r, "linear")) => RotaryScaling::Linear(factor(r)?),
        Some((r, "llama3")) => RotaryScaling::Llama3 {
            factor: factor(r)?,
            low: r.low_freq_factor.unwrap_or(1.0),
            high: r.high_freq_factor.unwrap_or(4.0),
            original_context: r.original_max_position_embeddings.unwrap_or(8192.0),
        },
        Some((_, other)) => {
            return Err(fail(format!("rope type {other:?} is not supported (default, linear, llama3)")));
        }
    };
    let theta = rope.and_then(|r| r.rope_theta).or(raw.rope_theta).unwrap_or(10_000.0);
    let heads = raw.num_attention_heads;
    let config = LlamaConfig {
        hidden: raw.hidden_size,
        feed_forward: raw.intermediate_size,
        layers: raw.num_hidden_layers,
        heads,
        kv_heads: raw.num_key_value_heads.unwrap_or(heads),
        head_dim: raw.head_dim.unwrap_or(raw.hidden_size / heads.max(1)),
        vocab: raw.vocab_size,
        context: raw.max_position_embeddings.unwrap_or(2048),
        eps: raw.rms_norm_eps.unwrap_or(1e-6),
        theta,
        scaling,
    };
    check(path, &config)?;
    Ok(config)
}

/// Refuses sizes that no llama has, before anything divides by them.
fn check(path: &Path, c: &LlamaConfig) -> Result<(), ModelError> {
    let sizes = [c.hidden, c.feed_forward, c.layers, c.heads, c.kv_heads, c.head_dim, c.vocab, c.context];
    if sizes.contains(&0) || !c.heads.is_multiple_of(c.kv_heads) || !c.head_dim.is_multiple_of(2) {
        return Err(checkpoint(path, format!("its sizes fit no llama: {c:?}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interleaved_rows_become_halves() {
        let values: Vec<f32> = (0..8).map(|v| v as f32).collect();
        assert_eq!(halves(&values, 2, 1), [0.0, 2.0, 1.0, 3.0, 4.0, 6.0, 5.0, 7.0]);
    }

    #[test]
    fn old_and_new_rope_keys_load() {
        let base =
            r#""model_type":"llama","hidden_size":8,"intermediate_size":16,"num_hidden_layers":1,"num_attention_heads":2,"vocab_size":9"#;
        let path = Path::new("config.json");
        let old = hub_config(path, &format!("{{{base},\"rope_theta\":5000.0}}")).unwrap();
        let new = hub_config(path, &format!("{{{base},\"rope_parameters\":{{\"rope_theta\":5000.0,\"rope_type\":\"default\"}}}}")).unwrap();
        assert_eq!(old, new);
        let other = hub_config(path, &format!("{{{base},\"rope_scaling\":{{\"type\":\"yarn\",\"factor\":2.0}}}}"));
        assert!(other.unwrap_err().to_string().contains("yarn"));
        let unknown = hub_config(path, "{\"model_type\":\"mamba\"}").unwrap_err().to_string();
        assert!(unknown.contains("mamba") && unknown.contains("llama"));
    }
}
