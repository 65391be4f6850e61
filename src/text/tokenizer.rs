//! One tokenization of a document, with the byte span of every token.

use std::path::Path;

use candle_core::quantized::gguf_file;
use tokenizers::models::bpe::{BPE, Vocab};
use tokenizers::normalizers::NFC;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::digits::Digits;
use tokenizers::pre_tokenizers::sequence::Sequence;
use tokenizers::pre_tokenizers::split::{Split, SplitPattern};
use tokenizers::tokenizer::SplitDelimiterBehavior;
use tokenizers::{AddedToken, PreTokenizerWrapper};

/// Version of the `tokenizers` crate: part of the key of cached edges.
pub const TOKENIZERS_VERSION: &str = "0.23.2";

/// Longest text, in bytes, that is tokenized in one go; longer text is tokenized in blocks.
pub const BLOCK_BYTES: usize = 1 << 20;

/// What can go wrong with a tokenizer or a text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// The tokenizer's description could not be read.
    #[error("tokenizer {origin}: {reason}")]
    Load {
        /// The file or metadata it came from.
        origin: String,
        /// What was wrong.
        reason: String,
    },
    /// The tokenizer refused a text.
    #[error("the tokenizer failed on this text: {0}")]
    Encode(String),
    /// A text has more tokens than an edge can count.
    #[error("the text has {0} tokens, more than the {max} a document may have", max = u32::MAX)]
    TooManyTokens(usize),
    /// A token that the configuration names is not in the vocabulary.
    #[error("the tokenizer has no token {0:?}; name one of its own special tokens")]
    UnknownToken(String),
}

/// The tokens of one document.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tokens {
    /// Token ids in text order.
    pub ids: Vec<u32>,
    /// Byte span of each token, as the tokenizer reports it (it may be odd; see [`super::find_edges`]).
    pub spans: Vec<(usize, usize)>,
}

/// A loaded tokenizer together with the hash of the bytes that describe it.
#[derive(Debug, Clone)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    hash: blake3::Hash,
}

impl Tokenizer {
    /// Loads a `tokenizer.json`.
    ///
    /// # Errors
    /// [`TextError::Load`] if the file cannot be read or describes no usable tokenizer.
    pub fn from_file(path: &Path) -> Result<Self, TextError> {
        let origin = path.display().to_string();
        let bytes = std::fs::read(path).map_err(|e| TextError::Load { origin: origin.clone(), reason: e.to_string() })?;
        let inner =
            tokenizers::Tokenizer::from_bytes(&bytes).map_err(|e| TextError::Load { origin: origin.clone(), reason: e.to_string() })?;
        Self::checked(inner, blake3::hash(&bytes), &origin)
    }

    /// Builds the tokenizer that GGUF metadata describes (`tokenizer.ggml.*`); `hash` is the hash of those bytes.
    ///
    /// # Errors
    /// [`TextError::Load`] if a key is missing or names a tokenizer that is not supported.
    pub fn from_gguf(content: &gguf_file::Content, hash: blake3::Hash, origin: &str) -> Result<Self, TextError> {
        let fail = |reason: String| TextError::Load { origin: origin.to_owned(), reason };
        let strings = |key: &str| -> Result<Vec<String>, TextError> {
            let value = content.metadata.get(key).ok_or_else(|| fail(format!("metadata key {key} is missing")))?;
            let list = value.to_vec().map_err(|e| fail(format!("{key}: {e}")))?;
            list.iter().map(|v| v.to_string().cloned().map_err(|e| fail(format!("{key}: {e}")))).collect()
        };
        let word = |key: &str| content.metadata.get(key).and_then(|v| v.to_string().ok()).cloned().unwrap_or_default();
        let family = word("tokenizer.ggml.model");
        if family != "gpt2" {
            return Err(fail(format!(
                "tokenizer.ggml.model is {family:?}; only byte-level BPE (\"gpt2\") can be built from GGUF metadata. \
                 Use a hub directory with tokenizer.json instead"
            )));
        }
        let tokens = strings("tokenizer.ggml.tokens")?;
        let merges = strings("tokenizer.ggml.merges")?
            .into_iter()
            .map(|m| {
                m.split_once(' ').map(|(a, b)| (a.to_owned(), b.to_owned())).ok_or_else(|| fail(format!("merge {m:?} has no space in it")))
            })
            .collect::<Result<Vec<_>, _>>()?;
        let vocab: Vocab = tokens.iter().enumerate().map(|(i, t)| (t.clone(), i as u32)).collect();
        let pre = word("tokenizer.ggml.pre");
        // Llama 3 takes a word that is a token whole, whatever its merges say.
        let whole_words = matches!(pre.as_str(), "llama3" | "llama-bpe");
        let bpe = BPE::builder().vocab_and_merges(vocab, merges).ignore_merges(whole_words).build().map_err(|e| fail(e.to_string()))?;
        let mut inner = tokenizers::Tokenizer::new(bpe);
        inner.with_pre_tokenizer(Some(pre_tokenizer(&pre).map_err(fail)?));
        inner.with_decoder(Some(ByteLevel::default()));
        if matches!(pre.as_str(), "qwen2" | "deepseek-r1-qwen") {
            inner.with_normalizer(Some(NFC)).map_err(|e| fail(e.to_string()))?;
        }

        // Token types: 3 is a control token, 4 a user-defined one; both are matched in the text before anything else.
        if let Some(types) = content.metadata.get("tokenizer.ggml.token_type").and_then(|v| v.to_vec().ok()) {
            let of_type = |wanted: i64, special: bool| -> Vec<AddedToken> {
                types
                    .iter()
                    .zip(&tokens)
                    .filter(|(ty, _)| ty.to_i32().map(i64::from).or_else(|_| ty.to_u32().map(i64::from)).is_ok_and(|t| t == wanted))
                    .map(|(_, token)| AddedToken::from(token.clone(), special))
                    .collect()
            };
            inner.add_special_tokens(of_type(3, true)).map_err(|e| fail(e.to_string()))?;
            inner.add_tokens(of_type(4, false)).map_err(|e| fail(e.to_string()))?;
        }
        Self::checked(inner, hash, origin)
    }

    /// Switches truncation and padding off and refuses a tokenizer whose offsets do not point into the text.
    fn checked(mut inner: tokenizers::Tokenizer, hash: blake3::Hash, origin: &str) -> Result<Self, TextError> {
        let fail = |reason: String| TextError::Load { origin: origin.to_owned(), reason };
        inner.with_truncation(None).map_err(|e| fail(e.to_string()))?;
        inner.with_padding(None);
        let this = Self { inner, hash };
        let probe = "A probe: naïve café, 3.14 and\n\ttabs; 東京 🎉 end.";
        let tokens = this.encode(probe)?;
        let monotone = tokens.spans.windows(2).all(|w| w[0].0 <= w[1].0);
        let inside = tokens.spans.iter().all(|&(s, e)| s <= e && e <= probe.len());
        let covered = tokens.spans.iter().map(|&(s, e)| e - s).sum::<usize>() * 2 >= probe.len();
        if !(monotone && inside && covered) {
            return Err(fail(
                "its byte offsets do not follow the text (a probe string came back with offsets out of order, outside the text or \
                 mostly missing), so its tokens cannot be placed"
                    .into(),
            ));
        }
        Ok(this)
    }

    /// Hash of the bytes that describe the tokenizer.
    #[must_use]
    pub fn hash(&self) -> blake3::Hash {
        self.hash
    }

    /// Rows that an embedding must have for every token: the largest id, added tokens included, plus 1.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab(true).into_values().max().map_or(0, |id| id as usize + 1)
    }

    /// Id of a token given by its text.
    ///
    /// # Errors
    /// [`TextError::UnknownToken`] if the vocabulary lacks it.
    pub fn token_id(&self, token: &str) -> Result<u32, TextError> {
        self.inner.token_to_id(token).ok_or_else(|| TextError::UnknownToken(token.to_owned()))
    }

    /// Tokenizes `text`, adding no special tokens. Spans are in bytes of `text`.
    ///
    /// Text above [`BLOCK_BYTES`] is tokenized in blocks that end before a single space between two non-spaces.
    ///
    /// # Errors
    /// [`TextError::Encode`] if the tokenizer fails, [`TextError::TooManyTokens`] above `u32::MAX` tokens.
    pub fn encode(&self, text: &str) -> Result<Tokens, TextError> {
        let mut out = Tokens::default();
        let mut start = 0;
        while start < text.len() {
            let end = block_end(text, start);
            let encoding = self.inner.encode(&text[start..end], false).map_err(|e| TextError::Encode(e.to_string()))?;
            out.ids.extend_from_slice(encoding.get_ids());
            out.spans.extend(encoding.get_offsets().iter().map(|&(s, e)| (s + start, e + start)));
            start = end;
        }
        if u32::try_from(out.ids.len()).is_err() {
            return Err(TextError::TooManyTokens(out.ids.len()));
        }
        Ok(out)
    }

    /// The same, but for the text of special tokens, which it takes for ordinary text: what a document quotes can end no turn of a conversation.
    #[must_use]
    pub fn without_special_tokens(&self) -> Self {
        let mut inner = self.inner.clone();
        inner.set_encode_special_tokens(true);
        Self { inner, hash: self.hash }
    }

    /// The text of tokens, special ones left out.
    ///
    /// # Errors
    /// [`TextError::Encode`] if the tokenizer fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String, TextError> {
        self.inner.decode(ids, true).map_err(|e| TextError::Encode(e.to_string()))
    }
}

/// End of the block that starts at byte `start`: the rest of the text if it is at most [`BLOCK_BYTES`], else the last place within
/// that many bytes that lies before a single space between two non-spaces, else (a mebibyte without one) the last character boundary.
fn block_end(text: &str, start: usize) -> usize {
    let bytes = text.as_bytes();
    if text.len() - start <= BLOCK_BYTES {
        return text.len();
    }
    let limit = start + BLOCK_BYTES;
    let single_space = |i: usize| bytes[i] == b' ' && !is_space(bytes[i - 1]) && bytes.get(i + 1).is_some_and(|&b| !is_space(b));
    (start + 1..=limit).rev().find(|&i| single_space(i)).unwrap_or_else(|| text.floor_char_boundary(limit))
}

/// Whether a byte is ASCII white space (a byte of a longer character never is).
fn is_space(byte: u8) -> bool {
    byte.is_ascii_whitespace() || byte == 0x0b
}

/// The pre-tokenizer that `tokenizer.ggml.pre` names.
fn pre_tokenizer(pre: &str) -> Result<PreTokenizerWrapper, String> {
    const LLAMA3: &str = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    // Qwen's differs from Llama 3's in that each digit stands alone.
    const QWEN2: &str = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
    let split = |regex: &str| -> Result<PreTokenizerWrapper, String> {
        let split =
            Split::new(SplitPattern::Regex(regex.to_owned()), SplitDelimiterBehavior::Isolated, false).map_err(|e| e.to_string())?;
        Ok(PreTokenizerWrapper::Sequence(Sequence::new(vec![split.into(), ByteLevel::new(false, true, false).into()])))
    };
    match pre {
        "smollm" => {
            Ok(PreTokenizerWrapper::Sequence(Sequence::new(vec![Digits::new(true).into(), ByteLevel::new(false, true, true).into()])))
        }
        "" | "default" | "gpt-2" => Ok(ByteLevel::new(false, true, true).into()),
        "llama3" | "llama-bpe" | "smaug-bpe" => split(LLAMA3),
        "qwen2" | "deepseek-r1-qwen" => split(QWEN2),
        other => Err(format!(
            "tokenizer.ggml.pre {other:?} is not known (known: smollm, gpt-2, default, llama-bpe, llama3, smaug-bpe, qwen2, deepseek-r1-qwen); \
             use a hub directory with tokenizer.json instead"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_end_before_a_single_space() {
        let text = "ab cd  ef ".repeat(BLOCK_BYTES / 10 + 50);
        let end = block_end(&text, 0);
        assert!(end <= BLOCK_BYTES && end > BLOCK_BYTES - 20);
        assert_eq!(&text[end - 1..end + 2], "b c");
        assert_eq!(block_end(&text, end), text.len());
    }

    #[test]
    fn a_mebibyte_without_spaces_ends_at_a_character() {
        let text = "é".repeat(BLOCK_BYTES);
        let end = block_end(&text, 1 - 1);
        assert!(end <= BLOCK_BYTES && text.is_char_boundary(end));
    }
}
