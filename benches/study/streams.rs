//! Flattened-record streams: three to six records of one domain that resemble each other, joined by one space.

use std::collections::HashSet;

use right_reset::model::{Encoder, EncoderScratch};
use serde_json::{Value, json};

/// A stream, with the byte at which each of its records begins.
#[derive(Debug, Clone)]
pub struct Stream {
    pub id: String,
    pub domain: String,
    pub text: String,
    pub starts: Vec<usize>,
}

impl Stream {
    pub fn read(lines: &str) -> Vec<Self> {
        let stream = |line: &str| {
            let v: Value = serde_json::from_str(line).expect("a JSON line");
            let word = |key: &str| v[key].as_str().expect("a string").to_owned();
            let starts =
                v["record_byte_starts"].as_array().expect("record_byte_starts").iter().map(|s| s.as_u64().expect("a byte") as usize);
            Self { id: word("id"), domain: word("domain"), starts: starts.collect(), text: word("text") }
        };
        lines.lines().filter(|l| !l.trim().is_empty()).map(stream).collect()
    }

    pub fn to_json(&self) -> Value {
        json!({ "id": self.id, "domain": self.domain, "text": self.text, "record_byte_starts": self.starts })
    }

    /// The records, as they were before they were joined.
    pub fn records(&self) -> impl Iterator<Item = &str> {
        let ends = self.starts.iter().skip(1).copied().chain([self.text.len()]);
        self.starts.iter().zip(ends).map(|(&start, end)| self.text[start..end].trim())
    }
}

/// Random numbers of a seed: hashes of a counter.
pub struct Dice(u64, u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        Self(seed, 0)
    }

    pub fn below(&mut self, n: usize) -> usize {
        self.1 += 1;
        let hash = blake3::hash(&[self.0.to_le_bytes(), self.1.to_le_bytes()].concat());
        let number = u64::from_le_bytes(hash.as_bytes()[..8].try_into().expect("8 bytes"));
        ((u128::from(number) * n as u128) >> 64) as usize
    }
}

/// Packs records that no other stream uses: a random one, and those nearest to it by embedding that are left.
pub fn build(records: &str, used: &[Stream], encoder: &Encoder, seed: u64) -> Vec<Stream> {
    let taken: HashSet<&str> = used.iter().flat_map(Stream::records).collect();
    let mut domains: Vec<(String, Vec<String>)> = Vec::new();
    let mut seen = HashSet::new();
    for line in records.lines().filter(|l| !l.trim().is_empty()) {
        let v: Value = serde_json::from_str(line).expect("a JSON line");
        let (domain, text) = (v["domain"].as_str().expect("domain"), v["text"].as_str().expect("text").trim());
        if taken.contains(text) || !seen.insert(text.to_owned()) {
            continue;
        }
        match domains.iter_mut().find(|(d, _)| d == domain) {
            Some((_, texts)) => texts.push(text.to_owned()),
            None => domains.push((domain.to_owned(), vec![text.to_owned()])),
        }
    }
    let mut dice = Dice::new(seed);
    let mut streams = Vec::new();
    for (domain, texts) in domains {
        let views: Vec<&str> = texts.iter().map(String::as_str).collect();
        let embeddings: Vec<Vec<f64>> =
            views.chunks(16).flat_map(|some| encoder.embed(some, &mut EncoderScratch::default()).expect("embeddings")).collect();
        let mut left: Vec<usize> = (0..texts.len()).collect();
        loop {
            let count = 3 + dice.below(4);
            if left.len() < count {
                break;
            }
            let first = left.swap_remove(dice.below(left.len()));
            let likeness = |i: &usize| -> f64 { embeddings[first].iter().zip(&embeddings[*i]).map(|(a, b)| a * b).sum() };
            left.sort_by(|a, b| likeness(b).total_cmp(&likeness(a)));
            let mut members = vec![first];
            members.extend(left.drain(..count - 1));
            let mut stream =
                Stream { id: format!("{domain}-{:03}", streams.len()), domain: domain.clone(), text: String::new(), starts: Vec::new() };
            for record in members {
                if !stream.text.is_empty() {
                    stream.text.push(' ');
                }
                stream.starts.push(stream.text.len());
                stream.text += &texts[record];
            }
            streams.push(stream);
        }
    }
    streams
}
