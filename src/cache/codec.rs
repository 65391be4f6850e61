//! The bytes of records: payloads of edges and curves, and the sealed entries they are stored in.

use crate::index::{ByteIdx, TokenIdx};
use crate::score::Curves;
use crate::text::{Edge, EdgeKind, Edges};

fn put(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

fn take(bytes: &mut &[u8]) -> Option<u64> {
    let mut value = 0_u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

/// Edges as bytes: token count, edge count, then per edge the tokens since the last edge with the kind in the low two bits, and the
/// bytes since the last edge; all as variable-length integers.
#[must_use]
pub fn encode_edges(edges: &Edges) -> Vec<u8> {
    let mut out = Vec::with_capacity(edges.edges.len() * 3 + 8);
    put(&mut out, u64::from(edges.tokens));
    put(&mut out, edges.edges.len() as u64);
    let (mut token, mut byte) = (0, 0);
    for edge in &edges.edges {
        let kind = match edge.kind {
            EdgeKind::Word => 0,
            EdgeKind::Sentence => 1,
            EdgeKind::Fallback => 2,
        };
        put(&mut out, u64::from(edge.token.0 - token) << 2 | kind);
        put(&mut out, edge.byte.0 - byte);
        (token, byte) = (edge.token.0, edge.byte.0);
    }
    out
}

/// Reads what [`encode_edges`] wrote; `None` for anything else, also for edges outside a text of `text_bytes` bytes.
#[must_use]
pub fn decode_edges(mut bytes: &[u8], text_bytes: usize) -> Option<Edges> {
    let bytes = &mut bytes;
    let tokens = u32::try_from(take(bytes)?).ok()?;
    let count = usize::try_from(take(bytes)?).ok()?;
    if count > bytes.len() {
        return None;
    }
    let (mut token, mut byte) = (0_u64, 0_u64);
    let mut edges = Vec::with_capacity(count);
    for _ in 0..count {
        let step = take(bytes)?;
        let kind = match step & 3 {
            0 => EdgeKind::Word,
            1 => EdgeKind::Sentence,
            2 => EdgeKind::Fallback,
            _ => return None,
        };
        let (tokens_on, bytes_on) = (step >> 2, take(bytes)?);
        token = token.checked_add(tokens_on)?;
        byte = byte.checked_add(bytes_on)?;
        if tokens_on == 0 || bytes_on == 0 || token >= u64::from(tokens) || byte >= text_bytes as u64 {
            return None;
        }
        edges.push(Edge { token: TokenIdx(token as u32), byte: ByteIdx(byte), kind });
    }
    bytes.is_empty().then_some(Edges { tokens, edges })
}

/// Curves as bytes: their number, then per curve its length and its floats.
#[must_use]
pub fn encode_curves(curves: &Curves) -> Vec<u8> {
    let mut out = Vec::with_capacity(curves.value_count() * 4 + curves.len() + 4);
    put(&mut out, curves.len() as u64);
    for curve in curves.iter() {
        put(&mut out, curve.len() as u64);
        curve.iter().for_each(|v| out.extend_from_slice(&v.to_le_bytes()));
    }
    out
}

/// Reads what [`encode_curves`] wrote; `None` for anything else, also for another number of curves.
#[must_use]
pub fn decode_curves(mut bytes: &[u8], count: usize) -> Option<Curves> {
    let bytes = &mut bytes;
    if take(bytes)? != count as u64 || count > bytes.len() {
        return None;
    }
    let mut curves = Curves::with_capacity(count, bytes.len() / 4);
    for _ in 0..count {
        let len = usize::try_from(take(bytes)?).ok()?;
        let (floats, rest) = bytes.split_at_checked(len.checked_mul(4)?)?;
        *bytes = rest;
        curves.push(floats.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)));
    }
    bytes.is_empty().then_some(curves)
}

/// Bytes of a key: text hash, namespace.
pub(super) const KEY: usize = 32 + 4;
pub(super) const MAGIC: [u8; 4] = *b"RRs2";
const HEADER: usize = 4 + KEY + 8 + 4;
const SEAL: usize = 8;
/// Payload bytes of an entry at most.
pub(super) const MAX_PAYLOAD: usize = 1 << 30;

/// The key of a record.
pub(super) fn key(text: &[u8; 32], namespace: u32) -> [u8; KEY] {
    let mut key = [0; KEY];
    key[..32].copy_from_slice(text);
    key[32..].copy_from_slice(&namespace.to_be_bytes());
    key
}

/// One record as it lies in the log. It names itself, so that the index can be made again from the log.
#[derive(Debug, PartialEq)]
pub(super) struct Entry<'a> {
    pub(super) key: [u8; KEY],
    /// First bytes of the namespace's hash: a number given to another namespace later never makes this record its own.
    pub(super) namespace: [u8; 8],
    pub(super) payload: &'a [u8],
}

impl<'a> Entry<'a> {
    /// Where in an entry its payload begins.
    pub(super) const PAYLOAD: usize = HEADER;

    /// Magic (which carries the version), key, namespace hash, payload bytes, payload, and a checksum over all of it.
    pub(super) fn seal(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.reserve(HEADER + self.payload.len() + SEAL);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&self.key);
        out.extend_from_slice(&self.namespace);
        out.extend_from_slice(&(self.payload.len() as u32).to_le_bytes());
        out.extend_from_slice(self.payload);
        let seal = blake3::hash(&out[start..]);
        out.extend_from_slice(&seal.as_bytes()[..SEAL]);
    }

    /// Opens an entry at the start of `bytes`; returns it and its length. The error is how many bytes it would need, if it may be cut off.
    pub(super) fn open(bytes: &'a [u8]) -> Result<(Self, usize), Option<usize>> {
        if bytes.len() < HEADER {
            return Err(MAGIC.starts_with(&bytes[..bytes.len().min(4)]).then_some(HEADER));
        }
        let length = |b: &[u8; 4]| u32::from_le_bytes(*b) as usize;
        let parts = || {
            let rest = bytes.strip_prefix(&MAGIC)?;
            let (key, rest) = rest.split_first_chunk::<KEY>()?;
            let (namespace, rest) = rest.split_first_chunk::<8>()?;
            let (len, rest) = rest.split_first_chunk::<4>()?;
            Some((key, namespace, length(len), rest))
        };
        let (key, namespace, len, rest) = parts().ok_or(None)?;
        if len > MAX_PAYLOAD {
            return Err(None);
        }
        let (Some(payload), Some(seal)) = (rest.get(..len), rest.get(len..len + SEAL)) else {
            return Err(Some(HEADER + len + SEAL));
        };
        if blake3::hash(&bytes[..HEADER + len]).as_bytes()[..SEAL] != *seal {
            return Err(None);
        }
        Ok((Self { key: *key, namespace: *namespace, payload }, HEADER + len + SEAL))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn edges() -> impl Strategy<Value = (Edges, usize)> {
        let kind = prop_oneof![Just(EdgeKind::Word), Just(EdgeKind::Sentence), Just(EdgeKind::Fallback)];
        (proptest::collection::vec((1u32..300, 1u64..2000, kind), 0..50), 1u32..9).prop_map(|(steps, tail)| {
            let (mut token, mut byte) = (0, 0);
            let edges: Vec<Edge> = steps
                .into_iter()
                .map(|(t, b, kind)| {
                    (token, byte) = (token + t, byte + b);
                    Edge { token: TokenIdx(token), byte: ByteIdx(byte), kind }
                })
                .collect();
            (Edges { tokens: token + tail, edges }, byte as usize + 1)
        })
    }

    proptest! {
        #[test]
        fn edges_come_back((edges, bytes) in edges()) {
            let coded = encode_edges(&edges);
            prop_assert_eq!(decode_edges(&coded, bytes), Some(edges.clone()));
            for cut in 0..coded.len() {
                prop_assert_ne!(decode_edges(&coded[..cut], bytes), Some(edges.clone()));
            }
        }

        #[test]
        fn curves_come_back(curves in proptest::collection::vec(proptest::collection::vec(-1e6f32..1e6, 0..6), 0..40)) {
            let curves: Curves = curves.into_iter().collect();
            let coded = encode_curves(&curves);
            prop_assert_eq!(decode_curves(&coded, curves.len()), Some(curves.clone()));
            prop_assert_eq!(decode_curves(&coded, curves.len() + 1), None);
        }

        #[test]
        fn any_bytes_are_refused_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), n in 0usize..100) {
            let _ = decode_edges(&bytes, n);
            let _ = decode_curves(&bytes, n);
            let _ = Entry::open(&bytes);
        }

        #[test]
        fn a_flipped_bit_breaks_the_seal(payload in proptest::collection::vec(any::<u8>(), 0..100), flip in any::<proptest::sample::Index>()) {
            let entry = Entry { key: key(&[7; 32], 3), namespace: [9; 8], payload: &payload };
            let mut sealed = Vec::new();
            entry.seal(&mut sealed);
            prop_assert!(Entry::open(&sealed) == Ok((entry, sealed.len())));
            prop_assert!((1..sealed.len()).all(|cut| matches!(Entry::open(&sealed[..cut]), Err(Some(_)))));
            let bit = flip.index(sealed.len() * 8);
            sealed[bit / 8] ^= 1 << (bit % 8);
            prop_assert!(Entry::open(&sealed).is_err());
        }
    }
}
