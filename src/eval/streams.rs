//! Flattened-record streams (paper section 4): records that resemble each other, joined by one space, so that nothing on the page says where one ends.

use std::collections::{BTreeMap, HashMap, HashSet};

use serde::{Deserialize, Serialize};

use super::Dice;

/// A record of a corpus.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Its id.
    pub id: String,
    /// Records are joined with others of their domain alone.
    pub domain: String,
    /// Its text, flattened.
    pub text: String,
}

/// A stream, with what it was made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stream {
    /// `<domain>-<split>-<number>`.
    pub id: String,
    /// The domain of its records.
    pub domain: String,
    /// The records, joined by one space; or what was read of a picture of it.
    pub text: String,
    /// Byte at which each record begins.
    pub record_byte_starts: Vec<usize>,
    /// Their ids.
    pub record_ids: Vec<String>,
}

/// How streams are packed.
#[derive(Debug, Clone, PartialEq)]
pub struct Packing {
    /// Everything drawn follows from it.
    pub seed: u64,
    /// Fewest and most records of a stream.
    pub records: (usize, usize),
    /// Most streams of a domain.
    pub streams: Option<usize>,
    /// Share of a domain's streams that are for calibration.
    pub calibration: f64,
}

/// Words parted by one space: no line, paragraph or layout is left.
#[must_use]
pub fn flatten(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Packs records into streams for calibration and for evaluation. Records that repeat a text are left out, and none is used twice. A stream begins with a record
/// drawn at random and goes on with the one most like the last, by `likeness` (of two numbers of records), of those left.
#[must_use]
pub fn pack(records: &[Record], likeness: impl Fn(usize, usize) -> f64, packing: &Packing) -> (Vec<Stream>, Vec<Stream>) {
    let mut seen = HashSet::new();
    let mut domains = BTreeMap::<&str, Vec<usize>>::new();
    for (i, record) in records.iter().enumerate() {
        if seen.insert(record.text.as_str()) {
            domains.entry(&record.domain).or_default().push(i);
        }
    }
    let mut dice = Dice::new(packing.seed);
    let (fewest, most) = packing.records;
    let mut split = (Vec::new(), Vec::new());
    for (domain, mut left) in domains {
        let mut packed: Vec<Vec<usize>> = Vec::new();
        while packing.streams.is_none_or(|streams| packed.len() < streams) {
            let count = fewest + dice.below(most - fewest + 1);
            if left.len() < count {
                break;
            }
            let mut members = vec![left.swap_remove(dice.below(left.len()))];
            while members.len() < count {
                let last = members[members.len() - 1];
                let best = (0..left.len())
                    .max_by(|&a, &b| likeness(last, left[a]).total_cmp(&likeness(last, left[b])).then(left[b].cmp(&left[a])));
                members.extend(best.map(|i| left.swap_remove(i)));
            }
            packed.push(members);
        }
        // Streams packed later have less to choose from: which are for calibration is drawn.
        let calibration = (packing.calibration * packed.len() as f64).round() as usize;
        for i in (1..packed.len()).rev() {
            packed.swap(i, dice.below(i + 1));
        }
        for (i, members) in packed.into_iter().enumerate() {
            let (name, to) = if i < calibration { ("calibration", &mut split.0) } else { ("evaluation", &mut split.1) };
            let number = if i < calibration { i } else { i - calibration };
            let prefix = if domain.is_empty() { String::new() } else { format!("{domain}-") };
            let mut stream = Stream {
                id: format!("{prefix}{name}-{:03}", number + 1),
                domain: domain.to_owned(),
                text: String::new(),
                record_byte_starts: Vec::new(),
                record_ids: Vec::new(),
            };
            for record in members.into_iter().map(|i| &records[i]) {
                if !stream.text.is_empty() {
                    stream.text.push(' ');
                }
                stream.record_byte_starts.push(stream.text.len());
                stream.record_ids.push(record.id.clone());
                stream.text += &record.text;
            }
            to.push(stream);
        }
    }
    split
}

/// How alike texts are by their words: the cosine of their tf-idf vectors. No model has a part in it.
pub struct WordLikeness(Vec<HashMap<usize, f64>>);

impl WordLikeness {
    /// Of these texts.
    #[must_use]
    pub fn new(texts: &[&str]) -> Self {
        let mut numbers = HashMap::<String, usize>::new();
        let mut documents = Vec::<f64>::new();
        let counted: Vec<BTreeMap<usize, f64>> = texts
            .iter()
            .map(|text| {
                let mut counts = BTreeMap::<usize, f64>::new();
                for word in words(text) {
                    let next = numbers.len();
                    *counts.entry(*numbers.entry(word).or_insert(next)).or_default() += 1.0;
                }
                documents.resize(numbers.len(), 0.0);
                counts.keys().for_each(|word| documents[*word] += 1.0);
                counts
            })
            .collect();
        let weigh = |counts: BTreeMap<usize, f64>| {
            let weight = |word: usize, count: f64| (1.0 + count.ln()) * (texts.len() as f64 / documents[word]).ln();
            let weights: Vec<(usize, f64)> = counts.into_iter().map(|(word, count)| (word, weight(word, count))).collect();
            let norm = weights.iter().map(|(_, w)| w * w).sum::<f64>().sqrt().max(f64::MIN_POSITIVE);
            weights.into_iter().map(|(word, w)| (word, w / norm)).collect()
        };
        Self(counted.into_iter().map(weigh).collect())
    }

    /// The cosine of two of them.
    #[must_use]
    pub fn of(&self, a: usize, b: usize) -> f64 {
        let (few, many) = if self.0[a].len() < self.0[b].len() { (a, b) } else { (b, a) };
        // In the order of words: a sum must not depend on that of a map.
        let mut shared: Vec<(usize, f64)> = self.0[few].iter().filter_map(|(word, v)| Some((*word, v * self.0[many].get(word)?))).collect();
        shared.sort_unstable_by_key(|s| s.0);
        shared.into_iter().map(|(_, v)| v).sum()
    }
}

/// Runs of letters and digits, in small letters.
fn words(text: &str) -> impl Iterator<Item = String> {
    text.split(|c: char| !c.is_alphanumeric()).filter(|w| !w.is_empty()).map(str::to_lowercase)
}

/// Lexical cohesion, as of TextTiling: the cosine of the word counts of two texts, 0 to 1. `None` where one has no word.
#[must_use]
pub fn lexical_cohesion(a: &str, b: &str) -> Option<f64> {
    let count = |text| {
        let mut counts = BTreeMap::<String, f64>::new();
        words(text).for_each(|word| *counts.entry(word).or_default() += 1.0);
        counts
    };
    let (a, b) = (count(a), count(b));
    let norm = |counts: &BTreeMap<String, f64>| counts.values().map(|c| c * c).sum::<f64>().sqrt();
    let dot: f64 = a.iter().filter_map(|(word, c)| Some(c * b.get(word)?)).sum();
    (!a.is_empty() && !b.is_empty()).then(|| dot / (norm(&a) * norm(&b)))
}

/// A stream with the text that was read of a picture of it: record starts go where the first character of the record went, or of what follows it if that was
/// lost. Gives also the agreement of the two texts: twice the characters in common over all of both. `None` if a record has left nothing behind.
#[must_use]
pub fn reread(stream: &Stream, read: &str) -> Option<(Stream, f64)> {
    let (old, new): (Vec<char>, Vec<char>) = (stream.text.chars().collect(), read.chars().collect());
    let pieces = similar::capture_diff_slices(similar::Algorithm::Myers, &old, &new);
    let mut common = 0;
    // For each character the place where it went, or where the next one that was kept did.
    let mut to = vec![new.len(); old.len()];
    for piece in &pieces {
        if let similar::DiffOp::Equal { old_index, new_index, len } = *piece {
            common += len;
            (0..len).for_each(|i| to[old_index + i] = new_index + i);
        }
    }
    for i in (0..old.len().saturating_sub(1)).rev() {
        if to[i] == new.len() {
            to[i] = to[i + 1];
        }
    }
    let character = |byte: usize| stream.text[..byte].chars().count();
    let byte_of = |character: usize| new[..character].iter().map(|c| c.len_utf8()).sum::<usize>();
    let mut starts: Vec<usize> = stream.record_byte_starts.iter().map(|&byte| byte_of(to[character(byte)])).collect();
    if let Some(first) = starts.first_mut() {
        *first = 0;
    }
    let sound = starts.windows(2).all(|pair| pair[0] < pair[1]) && starts.last().is_none_or(|last| *last < read.len());
    let agreement = 2.0 * common as f64 / (old.len() + new.len()).max(1) as f64;
    sound.then(|| (Stream { text: read.to_owned(), record_byte_starts: starts, ..stream.clone() }, agreement))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn records(count: usize) -> Vec<Record> {
        let domain = |i: usize| if i.is_multiple_of(3) { "a" } else { "b" }.to_owned();
        (0..count).map(|i| Record { id: format!("r{i}"), domain: domain(i), text: format!("text {i}") }).collect()
    }

    const PACKING: Packing = Packing { seed: 5, records: (3, 6), streams: None, calibration: 0.25 };

    #[test]
    fn no_record_is_used_twice_and_starts_are_those_of_records() {
        let mut records = records(90);
        records.push(Record { text: "text 3".into(), ..records[0].clone() });
        let (calibration, evaluation) = pack(&records, |a, b| -(a.abs_diff(b) as f64), &PACKING);
        let all: Vec<&Stream> = calibration.iter().chain(&evaluation).collect();
        let mut used = HashSet::new();
        for stream in &all {
            assert!((3..=6).contains(&stream.record_ids.len()));
            let ends = stream.record_byte_starts.iter().skip(1).map(|s| s - 1).chain([stream.text.len()]);
            for ((id, &start), end) in stream.record_ids.iter().zip(&stream.record_byte_starts).zip(ends) {
                let record = records.iter().find(|r| r.id == *id).unwrap();
                assert_eq!((&stream.text[start..end], &record.domain), (record.text.as_str(), &stream.domain));
                assert!(used.insert(id.clone()), "{id} is used twice");
            }
        }
        let of = |streams: &[Stream], domain: &str| streams.iter().filter(|s| s.domain == domain).count() as f64;
        for domain in ["a", "b"] {
            let all = of(&calibration, domain) + of(&evaluation, domain);
            assert_eq!(of(&calibration, domain), (all / 4.0).round());
        }
        assert_eq!(pack(&records, |a, b| -(a.abs_diff(b) as f64), &PACKING), (calibration, evaluation));
        let few = pack(&records, |_, _| 0.0, &Packing { streams: Some(2), calibration: 0.0, ..PACKING });
        assert_eq!((few.0.len(), few.1.len()), (0, 4));
    }

    #[test]
    fn a_record_is_followed_by_the_one_most_like_it() {
        let same: Vec<Record> = records(40).into_iter().map(|r| Record { domain: String::new(), ..r }).collect();
        let (_, streams) = pack(&same, |a, b| -(a.abs_diff(b) as f64), &Packing { calibration: 0.0, ..PACKING });
        let number = |id: &String| id[1..].parse::<i64>().unwrap();
        let first = streams.iter().find(|s| s.id == "evaluation-001").unwrap();
        assert!(first.record_ids.windows(2).all(|p| (number(&p[0]) - number(&p[1])).abs() < 40));
        let one = pack(&same, |a, b| -(a.abs_diff(b) as f64), &Packing { streams: Some(1), calibration: 0.0, ..PACKING }).1.remove(0);
        let ids: Vec<i64> = one.record_ids.iter().map(number).collect();
        assert!(ids.windows(2).all(|p| (p[0] - p[1]).abs() <= 2), "neighbours of a line: {ids:?}");
    }

    #[test]
    fn cohesion_by_hand() {
        // the 2, tea 1, bread 1 against the 1, river 2.
        let found = lexical_cohesion("The tea, the bread.", "the RIVER... River").unwrap();
        assert!((found - 2.0 / 30.0_f64.sqrt()).abs() < 1e-15, "{found}");
        assert!((lexical_cohesion("a b", "b a!").unwrap() - 1.0).abs() < 1e-15);
        assert_eq!((lexical_cohesion("a b", "c d"), lexical_cohesion("a", "... !")), (Some(0.0), None));
    }

    #[test]
    fn words_alike() {
        let likeness = WordLikeness::new(&["The river floods", "a river, FLOODS!", "bread and tea", "the bread"]);
        assert!(likeness.of(0, 1) > 0.4 && likeness.of(0, 2) == 0.0 && likeness.of(0, 3) > 0.0);
        assert!((likeness.of(2, 2) - 1.0).abs() < 1e-12);
    }

    #[test]
    fn starts_follow_their_records_into_what_was_read() {
        let stream = Stream {
            id: "s".into(),
            domain: String::new(),
            text: "Alpha beta. Gamma delta. Été fin.".into(),
            record_byte_starts: vec![0, 12, 25],
            record_ids: vec![],
        };
        let (same, agreement) = reread(&stream, &stream.text).unwrap();
        assert_eq!((same, agreement), (stream.clone(), 1.0));
        let (read, agreement) = reread(&stream, "A1pha beta. Garnma delta Eté fin.").unwrap();
        let texts: Vec<&str> = read.record_byte_starts.iter().map(|&s| &read.text[s..]).collect();
        assert!(texts[1].starts_with("Garnma") && texts[2].starts_with("té fin"), "{texts:?}");
        assert!((0.85..0.95).contains(&agreement), "{agreement}");
        assert!(reread(&stream, "Alpha beta.").is_none(), "two records are lost");
        assert_eq!(flatten(" a\n\nb\tc "), "a b c");
    }
}
