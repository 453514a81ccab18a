//! What else the machine is doing, and how much memory this process held.

use serde::Serialize;
use std::time::Instant;

/// Ticks of `/proc` a second, on every Linux that Rust supports.
const TICKS: f64 = 100.0;

/// Busy processors besides this process, above which a run is not quiet.
const QUIET: f64 = 0.15;

/// The machine during a run.
#[derive(Clone, Debug, Serialize)]
pub struct Machine {
    /// Its processor.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub processor: Option<String>,
    /// Processors that this process may use.
    pub processors: usize,
    /// Load average of the last minute when the run began and ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub load: Option<[f64; 2]>,
    /// Processors that others kept busy on average, time stolen by the host included.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub others_busy: Option<f64>,
    /// Whether nobody else worked; unknown counts as no.
    pub quiet: bool,
}

/// Watches the machine from now on.
pub struct Watch {
    start: Instant,
    load: Option<f64>,
    ticks: Option<(f64, f64)>,
}

impl Watch {
    /// Begins.
    pub fn begin() -> Watch {
        Watch { start: Instant::now(), load: load(), ticks: all_ticks().zip(own_ticks()) }
    }

    /// What the machine did since.
    pub fn end(self) -> Machine {
        let now = all_ticks().zip(own_ticks());
        let others_busy = self.ticks.zip(now).map(|((all_before, own_before), (all, own))| {
            let others = (all - all_before) - (own - own_before);
            (others / TICKS / self.start.elapsed().as_secs_f64()).max(0.0)
        });
        Machine {
            processor: processor(),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            load: self.load.zip(load()).map(|(before, after)| [before, after]),
            others_busy,
            quiet: others_busy.is_some_and(|busy| busy <= QUIET),
        }
    }
}

fn load() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}

fn processor() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_string())
}

/// Ticks that all processors together were busy, or stolen.
fn all_ticks() -> Option<f64> {
    busy_ticks(std::fs::read_to_string("/proc/stat").ok()?.lines().next()?)
}

/// Of a line `cpu user nice system idle iowait irq softirq steal ...`, all but idle and iowait.
fn busy_ticks(line: &str) -> Option<f64> {
    let mut fields = line.strip_prefix("cpu ")?.split_whitespace().map(str::parse::<f64>);
    let mut busy = 0.0;
    for at in 0..8 {
        let ticks = fields.next()?.ok()?;
        if !matches!(at, 3 | 4) {
            busy += ticks;
        }
    }
    Some(busy)
}

/// Ticks of this process and of those that it started and waited for.
fn own_ticks() -> Option<f64> {
    process_ticks(&std::fs::read_to_string("/proc/self/stat").ok()?)
}

/// Fields 14 to 17 of `/proc/PID/stat`; the name in brackets before them may hold anything.
fn process_ticks(stat: &str) -> Option<f64> {
    let behind_name = stat.rsplit_once(')')?.1;
    let fields: Option<Vec<f64>> =
        behind_name.split_whitespace().skip(11).take(4).map(|field| field.parse().ok()).collect();
    fields.filter(|fields| fields.len() == 4).map(|fields| fields.iter().sum())
}

/// Bytes of memory that this process held at most: `VmHWM`, mapped files included.
pub fn peak_bytes() -> Option<u64> {
    of_status(&std::fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}

/// Bytes of memory that this process holds now and that no file backs: `RssAnon`.
pub fn private_bytes() -> Option<u64> {
    of_status(&std::fs::read_to_string("/proc/self/status").ok()?, "RssAnon:")
}

/// Bytes of a line `NAME: N kB`.
fn of_status(status: &str, name: &str) -> Option<u64> {
    let line = status.lines().find(|line| line.starts_with(name))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kib| kib * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    // user 10, nice 20, system 30, idle 1000, iowait 2000, irq 1, softirq 2, steal 3, guest 99 (part of user).
    #[test]
    fn idle_time_is_not_busy() {
        assert_eq!(busy_ticks("cpu  10 20 30 1000 2000 1 2 3 99 0"), Some(66.0));
        assert_eq!(busy_ticks("cpu0 10 20 30 1000 2000 1 2 3"), None);
        assert_eq!(busy_ticks("cpu  10 20"), None);
    }

    // utime 7, stime 8, cutime 9, cstime 10 stand behind eleven fields after the name.
    #[test]
    fn a_name_with_brackets_and_blanks_is_skipped() {
        assert_eq!(process_ticks("42 (a) 1 (b) S 1 2 3 4 5 6 7 8 9 10 7 8 9 10 20 0"), Some(34.0));
        assert_eq!(process_ticks("42 (a) S 1 2"), None);
    }

    #[test]
    fn memory_is_counted_in_kib() {
        let status = "Name:\tkarat\nVmHWM:\t    2048 kB\nRssAnon:\t    1024 kB\n";
        assert_eq!(of_status(status, "VmHWM:"), Some(2 << 20));
        assert_eq!(of_status(status, "RssAnon:"), Some(1 << 20));
        assert_eq!(of_status(status, "VmSwap:"), None);
    }
}
