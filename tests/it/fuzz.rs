//! The fuzz targets (`fuzz/`) as property tests.

use proptest::prelude::*;

#[path = "../../fuzz/targets.rs"]
mod targets;

/// Bytes that look a little like what is expected.
fn lines() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        Just(b"{\"text\":\"".to_vec()),
        Just(b"\"}\n".to_vec()),
        Just(b"{\"kind\":\"part\",\"input\":\"a\",".to_vec()),
        Just(b"{\"kind\":\"removed\",\"file\":\"a\"}\n".to_vec()),
        Just(b"\n".to_vec()),
        Just(b"\xef\xbb\xbf".to_vec()),
        Just(b"\\ud800".to_vec()),
        proptest::collection::vec(any::<u8>(), 0..12),
        "\\PC{0,12}".prop_map(String::into_bytes),
    ];
    proptest::collection::vec(piece, 0..30).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn jsonl(bytes in lines()) {
        targets::jsonl(&bytes);
    }

    #[test]
    fn codec(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
        targets::codec(&bytes);
    }

    #[test]
    fn manifest(bytes in lines()) {
        targets::manifest(&bytes);
    }

    #[test]
    fn edges(text in "[ -~\\n\\r\\t\u{a0}\u{200d}\u{301}\u{e00}-\u{e3f}\u{3042}-\u{30ff}\u{4e00}-\u{4eff}\u{1f1e6}-\u{1f468}]{0,200}") {
        targets::edges(text.as_bytes());
    }
}
