//! Failures that are known: a file that says where, why, until when.
//!
//! ```json
//! {"schema": "karat/known-failures/1", "known": [
//!   {"site": "llama/prefill.layers.1.q_proj", "reason": "k tail of the 8x8 design",
//!    "link": "https://example.org/issues/17", "expires": "2027-01-31"},
//!   {"case": "linear/tail_of_k", "reason": "as above", "expires": "2027-01-31"}
//! ]}
//! ```
//!
//! `site` is a glob over `PACKAGE/TAP` (the choice of tokens is `PACKAGE/tokens`), `case` one over the names of `karat check`. A failure that is known is
//! SKIPPED with its reason. One that is not stays a failure and is listed as new; a known one that passes is
//! listed as passing, so that its line can go; an entry behind its day covers nothing and fails the run.

use serde::{Deserialize, Serialize};
use std::fmt::Write;
use std::path::Path;

use crate::mutants::matches;

/// The file.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    schema: String,
    known: Vec<Entry>,
}

/// A failure that is known.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Entry {
    /// Glob over `PACKAGE/TAP`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub site: Option<String>,
    /// Glob over cases of `karat check`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub case: Option<String>,
    /// Why it fails.
    pub reason: String,
    /// Where more about it stands.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub link: Option<String>,
    /// The last day on which it counts, `YYYY-MM-DD`.
    pub expires: String,
}

/// Why a file of known failures cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KnownError {
    /// It cannot be read.
    #[error("{path}: {source}")]
    Read {
        /// The file.
        path: String,
        /// Why.
        source: std::io::Error,
    },
    /// It is not what it should be.
    #[error(
        "{path}: {source}; expected {{\"schema\": \"{SCHEMA}\", \"known\": [{{\"site\" or \"case\", \"reason\", \"link\", \"expires\"}}, ...]}}"
    )]
    Json {
        /// The file.
        path: String,
        /// Why.
        source: serde_json::Error,
    },
    /// It is of another kind.
    #[error("{path}: schema is {found:?}, expected {SCHEMA:?}")]
    Schema {
        /// The file.
        path: String,
        /// What it says.
        found: String,
    },
    /// An entry names no place, or two.
    #[error("{path}, entry {entry}: expected one of site and case")]
    Place {
        /// The file.
        path: String,
        /// Which, counted from 1.
        entry: usize,
    },
    /// An entry's day is none.
    #[error("{path}, entry {entry}: expires is {found:?}, expected a day as YYYY-MM-DD")]
    Day {
        /// The file.
        path: String,
        /// Which, counted from 1.
        entry: usize,
        /// What it says.
        found: String,
    },
}

/// What `schema` says.
pub const SCHEMA: &str = "karat/known-failures/1";

/// A calendar day.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Day {
    year: i64,
    month: u32,
    day: u32,
}

impl Day {
    /// Reads `YYYY-MM-DD`.
    pub fn parse(text: &str) -> Option<Day> {
        let parts: Vec<&str> = text.split('-').collect();
        let [y, m, d] = parts[..] else { return None };
        let digits = |text: &str, n: usize| text.len() == n && text.bytes().all(|b| b.is_ascii_digit());
        if !(digits(y, 4) && digits(m, 2) && digits(d, 2)) {
            return None;
        }
        let day = Day { year: y.parse().ok()?, month: m.parse().ok()?, day: d.parse().ok()? };
        let leap = day.year % 4 == 0 && (day.year % 100 != 0 || day.year % 400 == 0);
        let days = match day.month {
            2 => 28 + u32::from(leap),
            4 | 6 | 9 | 11 => 30,
            1..=12 => 31,
            _ => return None,
        };
        (1..=days).contains(&day.day).then_some(day)
    }

    /// Today, in UTC.
    pub fn today() -> Day {
        let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Day::of_days(since.map_or(0, |since| (since.as_secs() / 86_400) as i64))
    }

    /// The day `days` behind 1970-01-01.
    ///
    /// Counted in eras of 400 years that start on 1 March, so that a leap day is the last of its year
    /// (H. Hinnant, "chrono-compatible low-level date algorithms").
    fn of_days(days: i64) -> Day {
        let shifted = days + 719_468;
        let (era, of_era) = (shifted.div_euclid(146_097), shifted.rem_euclid(146_097));
        let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
        let of_year = of_era - (365 * year + year / 4 - year / 100);
        let month = (5 * of_year + 2) / 153;
        let day = of_year - (153 * month + 2) / 5 + 1;
        let month = if month < 10 { month + 3 } else { month - 9 };
        let year = year + era * 400 + i64::from(month <= 2);
        Day { year, month: month as u32, day: day as u32 }
    }
}

/// The known failures of a file.
#[derive(Clone, Debug)]
pub struct Known {
    entries: Vec<(Entry, Day)>,
    today: Day,
}

/// What a run made of the known failures.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Outcome {
    /// What failed and is known.
    pub known: Vec<String>,
    /// What failed and is not known.
    pub new_failures: Vec<String>,
    /// Known failures of which everything that ran passes.
    pub new_passes: Vec<Entry>,
    /// Entries whose day is over.
    pub expired: Vec<Entry>,
    /// Entries that cover nothing of what ran.
    pub unmatched: Vec<Entry>,
}

/// Which of the two kinds of place a run has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Places {
    /// Sites of a model.
    Sites,
    /// Cases of an op.
    Cases,
}

impl Known {
    /// Reads a file, as of `today`.
    pub fn open(path: &Path, today: Day) -> Result<Known, KnownError> {
        let name = path.display().to_string();
        let text = std::fs::read_to_string(path)
            .map_err(|source| KnownError::Read { path: name.clone(), source })?;
        Known::parse(&text, &name, today)
    }

    /// Reads the text of the file called `name`.
    pub fn parse(text: &str, name: &str, today: Day) -> Result<Known, KnownError> {
        let path = name.to_string();
        let file: File =
            serde_json::from_str(text).map_err(|source| KnownError::Json { path: path.clone(), source })?;
        if file.schema != SCHEMA {
            return Err(KnownError::Schema { path, found: file.schema });
        }
        let mut entries = Vec::new();
        for (n, entry) in file.known.into_iter().enumerate() {
            let (path, number) = (path.clone(), n + 1);
            if entry.site.is_some() == entry.case.is_some() {
                return Err(KnownError::Place { path, entry: number });
            }
            let Some(day) = Day::parse(&entry.expires) else {
                return Err(KnownError::Day { path, entry: number, found: entry.expires });
            };
            entries.push((entry, day));
        }
        Ok(Known { entries, today })
    }

    /// Sorts out what ran: `(name, whether it failed)`. Where a failure is known, `excuse` is told its place
    /// in the list and why.
    pub fn sort(
        &self,
        places: Places,
        ran: &[(String, bool)],
        mut excuse: impl FnMut(usize, &Entry),
    ) -> Outcome {
        let mut outcome = Outcome::default();
        let of_kind = |entry: &Entry| match places {
            Places::Sites => entry.site.clone(),
            Places::Cases => entry.case.clone(),
        };
        let live: Vec<(&Entry, String)> = self
            .entries
            .iter()
            .filter(|(_, day)| *day >= self.today)
            .filter_map(|(entry, _)| Some((entry, of_kind(entry)?)))
            .collect();
        for (n, (name, failed)) in ran.iter().enumerate().filter(|(_, (_, failed))| *failed) {
            debug_assert!(failed);
            match live.iter().find(|(_, glob)| matches(glob, name)) {
                Some((entry, _)) => {
                    excuse(n, entry);
                    outcome.known.push(name.clone());
                }
                None => outcome.new_failures.push(name.clone()),
            }
        }
        for (entry, glob) in &live {
            let mut covered = ran.iter().filter(|(name, _)| matches(glob, name)).peekable();
            if covered.peek().is_none() {
                outcome.unmatched.push((*entry).clone());
            } else if covered.all(|(_, failed)| !failed) {
                outcome.new_passes.push((*entry).clone());
            }
        }
        let expired =
            self.entries.iter().filter(|(entry, day)| *day < self.today && of_kind(entry).is_some());
        outcome.expired = expired.map(|(entry, _)| entry.clone()).collect();
        outcome
    }
}

impl Entry {
    /// Its place and its reason, for a report.
    pub fn described(&self) -> String {
        let place = self.site.as_ref().or(self.case.as_ref()).map_or("", |place| place);
        let link = self.link.as_ref().map_or(String::new(), |link| format!(" ({link})"));
        format!("{place}: {}{link}", self.reason)
    }
}

/// Most names of a kind that a report lists.
const LISTED: usize = 5;

impl Outcome {
    /// Whether the run fails although every failure in it is known.
    pub fn fails(&self) -> bool {
        !self.expired.is_empty()
    }

    /// For a terminal or a comment: one line each.
    pub fn text(&self) -> String {
        let mut text = String::new();
        let more = |n: usize| if n > LISTED { format!(" and {} more", n - LISTED) } else { String::new() };
        for (what, names) in [("known", &self.known), ("new failure", &self.new_failures)] {
            if !names.is_empty() {
                let first: Vec<&str> = names.iter().take(LISTED).map(String::as_str).collect();
                let _ = writeln!(text, "{what}: {}{}", first.join(", "), more(names.len()));
            }
        }
        for (what, entries) in [
            ("new pass, take its line out", &self.new_passes),
            ("expired", &self.expired),
            ("covers nothing that ran", &self.unmatched),
        ] {
            for entry in entries {
                let _ = writeln!(text, "{what}: {}", entry.described());
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    // 2000-03-01 is day 11017: 30 years of 365 days, 7 leap days before 2000, and 31 + 29 days of 2000.
    #[test]
    fn days_by_hand() {
        let day = |year, month, day| Day { year, month, day };
        assert_eq!(Day::of_days(0), day(1970, 1, 1));
        assert_eq!(Day::of_days(11_016), day(2000, 2, 29));
        assert_eq!(Day::of_days(11_017), day(2000, 3, 1));
        assert_eq!(Day::of_days(30 * 365 + 7 + 31 + 29), day(2000, 3, 1));
        assert_eq!(Day::parse("2024-02-29"), Some(day(2024, 2, 29)));
        for wrong in ["2023-02-29", "2024-13-01", "2024-1-01", "2024-01-01-01", "tomorrow", "2024-+1-01"] {
            assert_eq!(Day::parse(wrong), None, "{wrong}");
        }
    }

    fn known(entries: &str) -> Result<Known, KnownError> {
        let today = Day::parse("2026-06-15").unwrap();
        Known::parse(&format!(r#"{{"schema": "{SCHEMA}", "known": [{entries}]}}"#), "known.json", today)
    }

    #[test]
    fn every_kind_of_entry_is_told_apart() {
        let known = known(
            r#"{"site": "llama/*.q_proj", "reason": "a", "expires": "2026-06-15"},
               {"site": "llama/*.k_proj", "reason": "b", "expires": "2026-06-16"},
               {"site": "llama/*.v_proj", "reason": "c", "expires": "2026-06-14"},
               {"site": "qwen3/*", "reason": "d", "link": "https://x", "expires": "2027-01-01"},
               {"case": "linear/*", "reason": "e", "expires": "2027-01-01"}"#,
        )
        .unwrap();
        let ran = [("llama/a.q_proj", true), ("llama/a.k_proj", false), ("llama/a.v_proj", true)];
        let ran = ran.map(|(name, failed)| (name.to_string(), failed));
        let mut excused = Vec::new();
        let outcome = known.sort(Places::Sites, &ran, |n, entry| excused.push((n, entry.reason.clone())));
        assert_eq!(excused, [(0, "a".to_string())]);
        assert_eq!(outcome.new_failures, ["llama/a.v_proj"]);
        let reasons = |entries: &[Entry]| entries.iter().map(|e| e.reason.clone()).collect::<Vec<_>>();
        assert_eq!(reasons(&outcome.new_passes), ["b"]);
        assert_eq!(reasons(&outcome.expired), ["c"]);
        assert_eq!(reasons(&outcome.unmatched), ["d"]);
        assert!(outcome.fails());
        assert!(outcome.text().contains("expired: llama/*.v_proj: c"), "{}", outcome.text());
    }

    #[test]
    fn a_wrong_entry_is_named() {
        for (entry, says) in [
            (r#"{"reason": "a", "expires": "2026-06-15"}"#, "entry 1: expected one of site and case"),
            (r#"{"site": "a", "reason": "a", "expires": "soon"}"#, "expires is \"soon\""),
            (r#"{"site": "a", "reason": "a", "expires": "2026-06-15", "until": 1}"#, "unknown field `until`"),
        ] {
            let error = known(entry).unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
    }
}
