//! What the fuzz targets and the property tests of CI check.

use std::io::Write;

use right_reset::cache::{decode_curves, decode_edges, encode_curves, encode_edges};
use right_reset::io::{FileFormat, InputFile, Lines, SourceReader, TextCell};
use right_reset::text::{EdgePolicy, Tokens, find_edges};

/// Reading lines: as many rows as there are lines that are not blank, by ascending numbers, each text, null or bad.
pub fn jsonl(bytes: &[u8]) {
    // What is packed is another format.
    if bytes.starts_with(&[0x1f, 0x8b]) || bytes.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        return;
    }
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    file.write_all(bytes).expect("room");
    let input = InputFile { path: file.path().to_owned(), relative: "x.jsonl".into(), format: Some(FileFormat::Jsonl) };
    let mut reader = SourceReader::open_columns(&input, "text", &[]).expect("lines are never refused as a whole");
    let mut rows = Vec::new();
    while let Some(batch) = reader.next_batch().expect("nor while they are read") {
        assert_eq!(batch.rows.len(), batch.texts().len());
        rows.extend_from_slice(&batch.rows);
        for text in batch.texts() {
            assert!(!matches!(text, TextCell::Bad(reason) if reason.is_empty()));
        }
    }
    let body = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes);
    let wanted = body.split(|&b| b == b'\n').filter(|line| !line.iter().all(u8::is_ascii_whitespace)).count();
    assert_eq!(rows.len(), wanted);
    assert!(rows.windows(2).all(|w| w[0] < w[1]));
}

/// Records: whatever decodes encodes to bytes that decode to the same.
pub fn codec(bytes: &[u8]) {
    if let Some(edges) = decode_edges(bytes, 1000) {
        assert_eq!(decode_edges(&encode_edges(&edges), 1000), Some(edges));
    }
    let count = bytes.first().map_or(0, |b| usize::from(b & 0x7f));
    if let Some(curves) = decode_curves(bytes, count) {
        let again = decode_curves(&encode_curves(&curves), count).expect("its own encoding");
        // NaN is unlike itself, its bits are not.
        assert!(again.iter().flatten().map(|v| v.to_bits()).eq(curves.iter().flatten().map(|v| v.to_bits())));
    }
}

/// A manifest: what is cut off from a sound one leaves the lines before it.
pub fn manifest(bytes: &[u8]) {
    if let Ok(lines) = Lines::parse(bytes) {
        let end = bytes.iter().rposition(|&b| b == b'\n').map_or(0, |at| at + 1);
        // The torn end changes nothing.
        let whole = Lines::parse(&bytes[..end]).expect("it has been read");
        assert_eq!(whole.parts, lines.parts);
    }
}

/// Edges of any text, its characters taken for tokens: ascending, on characters, never within a grapheme's bytes.
pub fn edges(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    let spans: Vec<(usize, usize)> = text.char_indices().map(|(at, c)| (at, at + c.len_utf8())).collect();
    let tokens = Tokens { ids: vec![0; spans.len()], spans };
    for policy in [EdgePolicy::default(), EdgePolicy { grid: 1, sentence_ends: true }, EdgePolicy { grid: 32, sentence_ends: false }] {
        let found = find_edges(text, &tokens, policy);
        assert_eq!(found.tokens as usize, tokens.ids.len());
        for pair in found.edges.windows(2) {
            assert!(pair[0].token < pair[1].token && pair[0].byte < pair[1].byte);
        }
        for edge in &found.edges {
            let byte = edge.byte.get();
            assert!(edge.token.0 > 0 && edge.token.0 < found.tokens && text.is_char_boundary(byte));
            assert!(text[byte..].chars().next().is_some_and(|c| !c.is_whitespace()));
        }
    }
}
