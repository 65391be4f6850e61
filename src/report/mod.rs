//! Pictures: one HTML file that shows chunks, scores and what another penalty would cut, and the same for a terminal.
//!
//! Knows what a document looks like, not how it was read or scored. The file needs no network, runs no code but its own, and puts document text into the page
//! as text alone. Its dynamic program is that of `segment`, term for term: both round each term once to a multiple of 2^-32 and add integers.

mod terminal;

use serde::Serialize;

pub use terminal::terminal;

/// Everything a report shows.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Report {
    /// What it is of.
    pub title: String,
    /// How documents are cut; none if only the chunks are known.
    pub program: Option<Program>,
    /// Figures of all documents.
    pub corpus: Corpus,
    /// Documents, in order.
    pub documents: Vec<Page>,
}

/// What the dynamic program needs beside the edges.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Program {
    /// Whether damages are minimised (penalties in nats) rather than percentiles maximised.
    pub damage: bool,
    /// The penalty in force.
    pub penalty: f64,
    /// Penalties that can be chosen: first, last, step.
    pub penalties: (f64, f64, f64),
    /// T.
    pub target: u32,
    /// Lmin.
    pub min: u32,
    /// Lmax.
    pub max: u32,
    /// lambda.
    pub length_weight: f64,
    /// Tokens at which curves are kept.
    pub knots: Vec<u32>,
}

/// Figures of all documents.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Corpus {
    /// Figures with their names, in the order to show.
    pub figures: Vec<(String, String)>,
    /// Tokens of each chunk.
    pub lengths: Vec<u32>,
    /// Scores of candidates.
    pub scores: Vec<f32>,
    /// Scores of cuts.
    pub cut_scores: Vec<f32>,
    /// Penalties, with the chunks that each gives and their mean tokens.
    pub sweep: Vec<(f64, u64, f64)>,
}

/// A document.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct Page {
    /// Its id.
    pub id: String,
    /// Its text.
    pub text: String,
    /// Its tokens.
    pub tokens: u32,
    /// Edges that it may be cut at; of a document whose chunks alone are known, those that it is.
    pub edges: PageEdges,
    /// Chosen edges, by number.
    pub cuts: Vec<usize>,
    /// Whether a limit gave way.
    pub relaxed: bool,
    /// First token of every true unit but the first, where they are known.
    pub gold: Option<Vec<u32>>,
}

/// Edges of a document, one list per property.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub struct PageEdges {
    /// Tokens on the left.
    pub token: Vec<u32>,
    /// UTF-16 units on the left, which is how a page counts.
    pub at: Vec<u32>,
    /// `word`, `sentence` or `fallback`; empty where it is not known.
    pub kind: Vec<&'static str>,
    /// Scores; none of a fallback edge.
    pub score: Vec<Option<f32>>,
    /// Utilities.
    pub utility: Vec<Option<f64>>,
    /// Curves of damage, where that is what counts.
    pub curve: Vec<Vec<f32>>,
    /// Tokens that each curve was scored for.
    pub scored: Vec<u32>,
    /// What each cut damaged, in nats, where it is known.
    pub damage: Vec<Option<f32>>,
}

impl Page {
    /// Where each chunk begins in the text, in bytes, with the number of the edge (none of the first chunk).
    pub(crate) fn chunks(&self) -> Vec<(usize, Option<usize>)> {
        let mut found = vec![(0, None)];
        let mut units = 0;
        let mut cuts = self.cuts.iter().peekable();
        for (byte, c) in self.text.char_indices() {
            while let Some(&&edge) = cuts.peek()
                && self.edges.at.get(edge).is_some_and(|at| *at <= units)
            {
                found.push((byte, Some(edge)));
                cuts.next();
            }
            units += c.len_utf16() as u32;
        }
        found
    }
}

/// The report as one HTML file.
#[must_use]
pub fn html(report: &Report) -> String {
    // Inside a script element only "</" and "<!--" could end or change it; as JSON, "<" can be written without itself.
    let data = serde_json::to_string(report).unwrap_or_default().replace('<', "\\u003c");
    let title = report.title.replace('&', "&amp;").replace('<', "&lt;");
    let page = include_str!("report.html");
    let fill = [("{{title}}", title.as_str()), ("{{style}}", include_str!("report.css")), ("{{script}}", include_str!("report.js"))];
    let page = fill.iter().fold(page.to_owned(), |page, (mark, text)| page.replace(mark, text));
    // Last, so that nothing in a document is taken for a mark.
    page.replace("{{data}}", &data)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(text: &str, at: &[u32]) -> Page {
        let edges = PageEdges { at: at.to_vec(), token: at.to_vec(), ..PageEdges::default() };
        Page { id: "a".into(), text: text.into(), cuts: (0..at.len()).collect(), edges, ..Page::default() }
    }

    #[test]
    fn text_that_looks_like_markup_or_like_a_mark_stays_text() {
        let hostile = "</script><script>alert(1)</script><!-- {{script}} {{style}} \u{2028}\0";
        let report = Report { title: "<b>&".into(), documents: vec![page(hostile, &[])], ..Report::default() };
        let html = html(&report);
        assert_eq!(html.matches("<script").count(), 2, "its own two");
        assert!(html.contains("<title>&lt;b>&amp;</title>") && !html.contains("<!-- {{"));
        let (_, rest) = html.split_once("type=\"application/json\">").unwrap();
        let (data, _) = rest.split_once("</script>").unwrap();
        let read: serde_json::Value = serde_json::from_str(data).unwrap();
        assert_eq!(read["documents"][0]["text"], hostile);
    }

    #[test]
    fn the_file_needs_no_network() {
        let html = html(&Report::default());
        assert!(!html.contains("http:") && !html.contains("https:") && !html.contains("src=") && html.contains("default-src 'none'"));
    }

    #[test]
    fn chunks_begin_where_a_page_counts_them() {
        // A character of two UTF-16 units and four bytes.
        assert_eq!(page("a😀b c", &[3, 5]).chunks(), [(0, None), (5, Some(0)), (7, Some(1))]);
    }
}
