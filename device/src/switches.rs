//! Switches that restore, in the same binary, what an optimisation replaced.

use crate::DeviceError;
use crate::resident::Group;

/// The arms of a comparison. The default is every optimisation on; no switch but `gdn=chunked` changes a
/// bit of the logits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Switches {
    /// `reload=…`: weights of these groups are decoded again in every pass although their images are resident.
    pub reload: Reload,
    /// `cache=off`: no image outlives the layer that uses it; it is decoded and packed in every pass.
    pub no_cache: bool,
    /// `batch=off`: a pass of n rows runs as n passes of one row.
    pub no_batch: bool,
    /// `poison=on`: scratch memory is overwritten with NaN between layers.
    pub poison: bool,
    /// `gdn=chunked`: passes of several rows run the gated delta rule in chunks instead of as a recurrence. Another
    /// order of the same sums: judged by tolerance, and dependent on how rows are cut.
    pub chunked_delta: bool,
}

/// Whose weights are decoded again in every pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reload {
    /// Nobody's.
    #[default]
    None,
    /// Those of attention and its relatives.
    Attention,
    /// Those of the feed-forward, experts included.
    FeedForward,
    /// Those of per-layer embeddings.
    PerLayer,
    /// All.
    All,
}

impl Reload {
    /// Whether weights of `group` are decoded again.
    pub fn covers(self, group: Group) -> bool {
        match self {
            Reload::None => false,
            Reload::Attention => group == Group::Attention,
            Reload::FeedForward => group == Group::FeedForward,
            Reload::PerLayer => group == Group::PerLayer,
            Reload::All => true,
        }
    }
}

impl Switches {
    /// Reads a list of switches: `reload=all,batch=off`. The empty string is the default.
    pub fn parse(list: &str) -> Result<Switches, DeviceError> {
        let mut switches = Switches::default();
        for switch in list.split(',').map(str::trim).filter(|s| !s.is_empty()) {
            match switch {
                "reload=none" => switches.reload = Reload::None,
                "reload=attn" => switches.reload = Reload::Attention,
                "reload=ffn" => switches.reload = Reload::FeedForward,
                "reload=ple" => switches.reload = Reload::PerLayer,
                "reload=all" => switches.reload = Reload::All,
                "cache=off" => switches.no_cache = true,
                "cache=on" => switches.no_cache = false,
                "batch=off" => switches.no_batch = true,
                "batch=on" => switches.no_batch = false,
                "poison=on" => switches.poison = true,
                "poison=off" => switches.poison = false,
                "gdn=chunked" => switches.chunked_delta = true,
                "gdn=recurrent" => switches.chunked_delta = false,
                _ => return Err(DeviceError::Switch { found: switch.to_string() }),
            }
        }
        Ok(switches)
    }
}

/// The list that [`Switches::parse`] reads: what differs from the default.
impl std::fmt::Display for Switches {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let reload = match self.reload {
            Reload::None => None,
            Reload::Attention => Some("reload=attn"),
            Reload::FeedForward => Some("reload=ffn"),
            Reload::PerLayer => Some("reload=ple"),
            Reload::All => Some("reload=all"),
        };
        let on = [
            (self.no_cache, "cache=off"),
            (self.no_batch, "batch=off"),
            (self.poison, "poison=on"),
            (self.chunked_delta, "gdn=chunked"),
        ];
        let on = on.into_iter().filter(|(on, _)| *on).map(|(_, switch)| switch);
        f.write_str(&reload.into_iter().chain(on).collect::<Vec<_>>().join(","))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_read_and_unknown_switches_named() {
        let switches = Switches::parse("reload=all, batch=off").unwrap();
        assert_eq!(switches, Switches { reload: Reload::All, no_batch: true, ..Switches::default() });
        assert_eq!(Switches::parse("").unwrap(), Switches::default());
        let list = "reload=ple,cache=off,batch=off,poison=on,gdn=chunked";
        assert_eq!(Switches::parse(list).unwrap().to_string(), list);
        let error = Switches::parse("reload=atn").unwrap_err();
        assert!(error.to_string().starts_with("switch reload=atn is not known"), "{error}");
    }
}
