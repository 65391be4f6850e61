//! Where graphemes, words and sentences begin, by UAX #29 as ICU4X implements it.

use icu_properties::props::{GeneralCategory, Script, TerminalPunctuation};
use icu_properties::{CodePointMapData, CodePointSetData};
use icu_segmenter::options::{SentenceBreakInvariantOptions, WordBreakInvariantOptions};
use icu_segmenter::{GraphemeClusterSegmenter, SentenceSegmenter, WordSegmenter};

/// Longest run, in bytes, given to a segmenter at once, so that no pathological text makes work or memory grow faster than the text.
const RUN_BYTES: usize = 1 << 14;

/// Whether `c` may not begin a chunk: general categories Pe and Pf, or `Terminal_Punctuation`.
pub(super) fn is_closing(c: char) -> bool {
    if c.is_ascii() {
        return matches!(c, ')' | ']' | '}' | '!' | ',' | '.' | ':' | ';' | '?');
    }
    matches!(CodePointMapData::<GeneralCategory>::new().get(c), GeneralCategory::ClosePunctuation | GeneralCategory::FinalPunctuation)
        || CodePointSetData::new::<TerminalPunctuation>().contains(c)
}

/// Whether `c` belongs to a script that is written without spaces between words.
fn is_unspaced(c: char) -> bool {
    !c.is_ascii()
        && matches!(
            CodePointMapData::<Script>::new().get(c),
            Script::Han | Script::Hiragana | Script::Katakana | Script::Thai | Script::Lao | Script::Khmer | Script::Myanmar
        )
}

/// Whether `c` may stand inside a run of unspaced script without ending it: shared marks and punctuation, but no white space.
fn joins_run(c: char) -> bool {
    !c.is_ascii() && !c.is_whitespace() && matches!(CodePointMapData::<Script>::new().get(c), Script::Common | Script::Inherited)
}

/// A set of byte positions of a text.
#[derive(Debug, Clone)]
pub(super) struct ByteSet(Vec<u64>);

impl ByteSet {
    fn new(len: usize) -> Self {
        Self(vec![0; len / 64 + 1])
    }

    fn insert(&mut self, at: usize) {
        self.0[at / 64] |= 1 << (at % 64);
    }

    /// Whether byte position `at` is in the set.
    pub(super) fn contains(&self, at: usize) -> bool {
        self.0[at / 64] >> (at % 64) & 1 == 1
    }
}

/// Positions at which a grapheme cluster begins, or `None` where every character of the text is one (ASCII text; the two characters of
/// a CR LF are white space, before which no edge lies).
pub(super) fn grapheme_starts(text: &str) -> Option<ByteSet> {
    if text.is_ascii() {
        return None;
    }
    let mut starts = ByteSet::new(text.len());
    for at in GraphemeClusterSegmenter::new().segment_str(text) {
        starts.insert(at);
    }
    Some(starts)
}

/// Positions inside runs of unspaced script at which a word begins, or `None` if the text has no such run.
///
/// An opening bracket or quotation mark inside a run begins a word too.
pub(super) fn unspaced_word_starts(text: &str) -> Option<ByteSet> {
    if text.is_ascii() {
        return None;
    }
    let segmenter = WordSegmenter::new_auto(WordBreakInvariantOptions::default());
    let mut starts: Option<ByteSet> = None;
    let mut run: Option<(usize, bool)> = None;
    let mut close = |start: usize, end: usize, unspaced: bool| {
        if !unspaced {
            return;
        }
        let set = starts.get_or_insert_with(|| ByteSet::new(text.len()));
        let slice = &text[start..end];
        for at in segmenter.segment_str(slice) {
            let Some(c) = slice[at..].chars().next() else {
                continue;
            };
            let opens = || {
                matches!(
                    CodePointMapData::<GeneralCategory>::new().get(c),
                    GeneralCategory::OpenPunctuation | GeneralCategory::InitialPunctuation
                )
            };
            if is_unspaced(c) || opens() {
                set.insert(start + at);
            }
        }
    };
    for (at, c) in text.char_indices() {
        let unspaced = is_unspaced(c);
        let member = unspaced || joins_run(c);
        run = match run {
            Some((start, seen)) if member && at - start < RUN_BYTES => Some((start, seen || unspaced)),
            Some((start, seen)) => {
                close(start, at, seen);
                member.then_some((at, unspaced))
            }
            None => member.then_some((at, unspaced)),
        };
    }
    if let Some((start, seen)) = run {
        close(start, text.len(), seen);
    }
    starts
}

/// Byte positions at which a sentence ends, ascending, the end of the text left out.
///
/// UAX #29 on a copy in which a line break inside a paragraph is a space. A line break stays one, and so ends a sentence, if a blank
/// line follows or precedes it, if a sentence terminator stands before it, or if the next line begins with a list mark or is indented.
pub(super) fn sentence_ends(text: &str) -> Vec<usize> {
    let joined = join_lines(text);
    let segmenter = SentenceSegmenter::new(SentenceBreakInvariantOptions::default());
    let mut ends = Vec::new();
    let mut start = 0;
    // UAX #29 rules SB8 looks ahead over any number of characters: bounded runs, which end at a line break or a space where there is
    // one, keep the work linear.
    while start < joined.len() {
        let end = run_end(&joined, start);
        ends.extend(segmenter.segment_str(&joined[start..end]).filter(|&at| at > 0 && at < end - start).map(|at| at + start));
        if end < joined.len() && joined.as_bytes()[end - 1] == b'\n' {
            ends.push(end);
        }
        start = end;
    }
    ends
}

/// End of the run of at most [`RUN_BYTES`] that starts at `start`: after its last line feed, else before its last letter that follows a
/// space, else at a character boundary.
fn run_end(text: &str, start: usize) -> usize {
    if text.len() - start <= RUN_BYTES {
        return text.len();
    }
    let limit = text.floor_char_boundary(start + RUN_BYTES);
    let bytes = &text.as_bytes()[start..limit];
    if let Some(at) = bytes.iter().rposition(|&b| b == b'\n') {
        return start + at + 1;
    }
    let before_word = (1..bytes.len()).rev().find(|&i| bytes[i - 1] == b' ' && bytes[i].is_ascii_lowercase());
    before_word.map_or(limit, |i| start + i)
}

/// `text` with each line break inside a paragraph turned into spaces of the same length.
fn join_lines(text: &str) -> String {
    let mut bytes = text.as_bytes().to_vec();
    let mut at = 0;
    while let Some(found) = bytes[at..].iter().position(|&b| b == b'\n' || b == b'\r') {
        let begin = at + found;
        let end = if bytes[begin] == b'\r' && bytes.get(begin + 1) == Some(&b'\n') { begin + 2 } else { begin + 1 };
        if !ends_sentence(&text[..begin], &text[end..]) {
            bytes[begin..end].fill(b' ');
        }
        at = end;
    }
    // Only whole ASCII characters were replaced by ASCII characters.
    String::from_utf8(bytes).unwrap_or_else(|_| text.to_owned())
}

/// Whether the line break between `before` and `after` ends a sentence.
fn ends_sentence(before: &str, after: &str) -> bool {
    const LOOK: usize = 256;
    // A blank line on either side, white space on it or not.
    let tail = before.trim_end_matches([' ', '\t']);
    let line = after.split(['\n', '\r']).next().unwrap_or_default();
    if tail.is_empty() || tail.ends_with(['\n', '\r']) || line.trim().is_empty() {
        return true;
    }
    if line.starts_with([' ', '\t', '\u{a0}', '\u{3000}']) || starts_with_list_mark(line) {
        return true;
    }
    // A terminator, with closing quotes and brackets after it.
    let quotes = |c: &char| matches!(c, '"' | '\'' | '”' | '’' | '»') || (is_closing(*c) && !is_terminator(*c));
    tail.chars().rev().take(LOOK).find(|c| !quotes(c)).is_some_and(is_terminator)
}

/// Whether `c` ends sentences.
fn is_terminator(c: char) -> bool {
    matches!(c, '.' | '!' | '?' | '…' | '。' | '！' | '？' | '．' | '｡' | '؟' | '۔' | '।' | '॥' | '።' | '‼' | '⁇' | '⁈' | '⁉')
}

/// Whether a line begins with a list mark: a bullet, or a number or single letter closed by `.` or `)`, and a space.
fn starts_with_list_mark(line: &str) -> bool {
    let Some((mark, _)) = line.get(..line.len().min(16).min(line.floor_char_boundary(16))).and_then(|head| head.split_once([' ', '\t']))
    else {
        return false;
    };
    if matches!(mark, "-" | "*" | "+" | "•" | "‣" | "◦" | "–" | "—") || (!mark.is_empty() && mark.bytes().all(|b| b == b'#')) {
        return true;
    }
    let Some(body) = mark.strip_suffix(['.', ')']) else {
        return false;
    };
    let body = body.strip_prefix('(').unwrap_or(body);
    (body.len() <= 4 && !body.is_empty() && body.bytes().all(|b| b.is_ascii_digit()))
        || (mark.ends_with(')') && body.len() == 1 && body.bytes().all(|b| b.is_ascii_alphabetic()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sentences(text: &str) -> Vec<&str> {
        let mut out = Vec::new();
        let mut start = 0;
        for end in sentence_ends(text).into_iter().chain([text.len()]) {
            out.push(&text[start..end]);
            start = end;
        }
        out
    }

    #[test]
    fn a_line_feed_inside_a_paragraph_counts_as_a_space() {
        assert_eq!(sentences("One line\nwraps here. Two\r\nwraps too."), ["One line\nwraps here. ", "Two\r\nwraps too."]);
    }

    #[test]
    fn blank_lines_terminators_lists_and_indents_end_sentences() {
        assert_eq!(sentences("Title\n\nbody"), ["Title\n", "\n", "body"]);
        assert_eq!(sentences("so it ends.\nthen on"), ["so it ends.\n", "then on"]);
        assert_eq!(sentences("Buy:\n- milk\n- bread\n2) eggs"), ["Buy:\n", "- milk\n", "- bread\n", "2) eggs"]);
        assert_eq!(sentences("def f():\n    return 1"), ["def f():\n", "    return 1"]);
    }

    #[test]
    fn unspaced_scripts_have_word_starts_and_opening_quotes() {
        let text = "電源を入れた。「はい」と";
        let set = unspaced_word_starts(text).unwrap();
        let at = |s: &str| text.find(s).unwrap();
        assert!(set.contains(at("を")) && set.contains(at("「")) && set.contains(at("はい")));
        assert!(!set.contains(at("。")) && !set.contains(at("」")));
    }

    #[test]
    fn closing_punctuation_is_known_in_every_script() {
        assert!([')', '.', '。', '」', '”', '؟'].into_iter().all(is_closing));
        assert!(!['(', 'a', '「', '-', '漢'].into_iter().any(is_closing));
    }

    #[test]
    fn a_long_digit_text_takes_linear_time() {
        let text = "1. ".repeat(400_000);
        assert!(sentence_ends(&text).len() < text.len());
    }
}
