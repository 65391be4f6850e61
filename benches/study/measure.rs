//! Documents with their curves, metrics against true record starts, and intervals.

use std::collections::HashMap;

use arrow::array::{Array, AsArray};
use arrow::datatypes::{Float32Type, Int32Type};
use right_reset::segment::{Cut, Limits, open_damage};
use right_reset::text::Tokenizer;

use crate::streams::{Dice, Stream};

/// A candidate edge, with what was read of it.
#[derive(Debug, Clone, Default)]
pub struct Edge {
    pub token: u32,
    pub sentence: bool,
    pub curves: HashMap<String, Vec<f32>>,
    pub embed: f32,
}

#[derive(Debug, Clone)]
pub struct Doc {
    pub domain: String,
    pub tokens: u32,
    pub edges: Vec<Edge>,
    /// First token of each record.
    pub starts: Vec<u32>,
}

impl Doc {
    pub fn new(stream: &Stream, tokenizer: &Tokenizer) -> Self {
        let tokens = tokenizer.encode(&stream.text).expect("tokens");
        // A token is where its first character that is no space is.
        let place = |&(start, end): &(usize, usize)| start + stream.text[start..end].find(|c: char| !c.is_whitespace()).unwrap_or(0);
        let places: Vec<usize> = tokens.spans.iter().map(place).collect();
        let starts = stream.starts.iter().map(|s| places.partition_point(|p| p < s) as u32).collect();
        Self { domain: stream.domain.clone(), tokens: tokens.ids.len() as u32, edges: Vec::new(), starts }
    }
}

/// Adds the edges and curves of an export to documents, in the order of `ids`.
pub fn read_edges(path: &std::path::Path, ids: &[String], docs: &mut [Doc], names: &[(&str, &str)]) {
    let file = std::fs::File::open(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let reader = parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder::try_new(file).unwrap().build().unwrap();
    let number: HashMap<&str, usize> = ids.iter().enumerate().map(|(i, id)| (id.as_str(), i)).collect();
    for batch in reader {
        let batch = batch.unwrap();
        let column = |name: &str| batch.column_by_name(name).unwrap_or_else(|| panic!("no column {name}"));
        let id = arrow::compute::cast(column("doc_id"), &arrow::datatypes::DataType::Utf8).unwrap();
        let (id, token) = (id.as_string::<i32>(), column("token").as_primitive::<Int32Type>());
        let kind = arrow::compute::cast(column("kind"), &arrow::datatypes::DataType::Utf8).unwrap();
        for row in 0..batch.num_rows() {
            let Some(&doc) = number.get(id.value(row)) else { continue };
            let doc = &mut docs[doc];
            let token = token.value(row) as u32;
            let at = doc.edges.partition_point(|e| e.token < token);
            if doc.edges.get(at).is_none_or(|e| e.token != token) {
                let sentence = kind.as_string::<i32>().value(row) == "sentence";
                doc.edges.insert(at, Edge { token, sentence, ..Edge::default() });
            }
            for (from, to) in names {
                if *from == "score" {
                    doc.edges[at].embed = column(from).as_primitive::<Float32Type>().value(row);
                    continue;
                }
                let list = column(from).as_list::<i32>();
                if !list.is_null(row) {
                    let values = list.value(row);
                    doc.edges[at].curves.insert((*to).to_owned(), values.as_primitive::<Float32Type>().values().to_vec());
                }
            }
        }
    }
}

/// What a segmentation gets right.
#[derive(Debug, Clone, Copy, Default)]
pub struct Found {
    pub records: f64,
    pub recovered: f64,
    /// Tokens, those in their chunk's largest record, and those in their record's largest chunk.
    pub tokens: f64,
    pub pure: f64,
    pub complete: f64,
    pub chunks: f64,
}

impl Found {
    pub fn add(&mut self, other: &Self) {
        self.records += other.records;
        self.recovered += other.recovered;
        self.tokens += other.tokens;
        self.pure += other.pure;
        self.complete += other.complete;
        self.chunks += other.chunks;
    }

    pub fn recovery(&self) -> f64 {
        self.recovered / self.records.max(1.0)
    }

    pub fn f1(&self) -> f64 {
        let (p, c) = (self.pure / self.tokens, self.complete / self.tokens);
        2.0 * p * c / (p + c)
    }
}

pub fn judge(doc: &Doc, cuts: &[u32]) -> Found {
    let spans = |starts: &[u32]| -> Vec<(u32, u32)> {
        let ends = starts.iter().skip(1).copied().chain([doc.tokens]);
        starts.iter().copied().zip(ends).collect()
    };
    let (records, chunks) = (spans(&doc.starts), spans(&[&[0], cuts].concat()));
    let overlap = |a: &(u32, u32), b: &(u32, u32)| f64::from(a.1.min(b.1).saturating_sub(a.0.max(b.0)));
    let size = |a: &(u32, u32)| f64::from(a.1 - a.0);
    let best = |a: &(u32, u32), of: &[(u32, u32)]| of.iter().map(|b| overlap(a, b)).fold(0.0, f64::max);
    let clean = |r: &(u32, u32)| chunks.iter().any(|c| overlap(r, c) >= 0.9 * size(r) && overlap(r, c) >= 0.9 * size(c));
    Found {
        records: records.len() as f64,
        recovered: records.iter().filter(|r| clean(r)).count() as f64,
        tokens: f64::from(doc.tokens),
        pure: chunks.iter().map(|c| best(c, &records)).sum(),
        complete: records.iter().map(|r| best(r, &chunks)).sum(),
        chunks: chunks.len() as f64,
    }
}

/// Cuts a document by a damage per edge and chunk length; an edge whose damage is NaN is no candidate.
pub fn cut(doc: &Doc, penalty: f64, weight: f64, damage: impl Fn(usize, u32) -> f64) -> Vec<u32> {
    let usable: Vec<usize> = (0..doc.edges.len()).filter(|&i| !damage(i, 48).is_nan()).collect();
    let cuts: Vec<Cut> = usable.iter().map(|&i| Cut { token: doc.edges[i].token, utility: Some(0.0) }).collect();
    let limits = Limits { length_weight: weight, ..Limits::default() };
    let found = open_damage(&cuts, doc.tokens, &limits, penalty, |i, lens, out| {
        out.iter_mut().zip(lens).for_each(|(out, &len)| *out = damage(usable[i], len));
    });
    found.cuts.into_iter().map(|i| cuts[i].token).collect()
}

/// 95 % interval of a statistic over streams drawn again within their domains, 2,000 times.
pub fn interval(docs: &[Doc], statistic: impl Fn(&[usize]) -> f64) -> (f64, f64) {
    let mut dice = Dice::new(7);
    let mut domains: HashMap<&str, Vec<usize>> = HashMap::new();
    for (i, doc) in docs.iter().enumerate() {
        domains.entry(&doc.domain).or_default().push(i);
    }
    let mut domains: Vec<_> = domains.into_iter().collect();
    domains.sort();
    let mut values: Vec<f64> = (0..2000)
        .map(|_| {
            let drawn: Vec<usize> =
                domains.iter().flat_map(|(_, own)| (0..own.len()).map(|_| own[dice.below(own.len())]).collect::<Vec<_>>()).collect();
            statistic(&drawn)
        })
        .collect();
    values.sort_by(f64::total_cmp);
    (values[50], values[1949])
}
