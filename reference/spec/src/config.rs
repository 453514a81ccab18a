//! Reading `config.json` so that no key is passed over in silence.

use serde_json::{Map, Value};
use std::collections::BTreeSet;

/// Why a config is refused.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum ConfigError {
    /// A key that the family needs is not there.
    #[error("config key {key} is missing; expected {expected}")]
    Missing {
        /// The key.
        key: String,
        /// What it should hold.
        expected: String,
    },
    /// A key holds something that is not understood or not possible.
    #[error("config key {key} is {found}; supported: {expected}")]
    Value {
        /// The key.
        key: String,
        /// What it holds.
        found: String,
        /// What is supported.
        expected: String,
    },
    /// A key that this family does not know. It might change the mathematics.
    #[error(
        "config key {key} (= {found}) is not understood and may change the computation; pass --allow-unknown {key} to ignore it"
    )]
    Unknown {
        /// The key.
        key: String,
        /// What it holds.
        found: String,
    },
}

/// Keys that never change what a forward pass computes: training, generation and bookkeeping.
const INERT: &[&str] = &[
    "_name_or_path",
    "architectures",
    "attention_dropout",
    "auto_map",
    "bos_token_id",
    "cls_token_id",
    "decoder_start_token_id",
    "dtype",
    "embd_pdrop",
    "eos_token_id",
    "hidden_dropout",
    "id2label",
    "initializer_range",
    "label2id",
    "name",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "pretraining_tp",
    "resid_pdrop",
    "return_dict",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "sep_token_id",
    "task_specific_params",
    "tokenizer_class",
    "torch_dtype",
    "transformers_version",
    "unk_token_id",
    "use_cache",
    "chunk_size_feed_forward",
    "is_encoder_decoder",
    "problem_type",
];

/// What became of a key of a config.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyUse {
    /// The family reads it.
    Read,
    /// Known to change nothing that a forward pass computes.
    Inert,
    /// Not known, but null or false: a switch that is off.
    Off,
    /// Not known, and allowed by name.
    Allowed,
    /// Not known: it may change the computation.
    Unknown,
}

/// A config's keys, each of which is consumed, known to be inert, or refused at the end.
pub struct ConfigReader<'a> {
    map: &'a Map<String, Value>,
    path: String,
    used: BTreeSet<String>,
    inert: BTreeSet<String>,
}

impl<'a> ConfigReader<'a> {
    /// A reader over a JSON object. `path` is put before keys in messages: `rope_parameters.`.
    pub fn new(map: &'a Map<String, Value>, path: &str) -> Self {
        Self { map, path: path.to_string(), used: BTreeSet::new(), inert: BTreeSet::new() }
    }

    fn key(&self, key: &str) -> String {
        format!("{}{key}", self.path)
    }

    /// The value of `key`; null counts as absent.
    pub fn get(&mut self, key: &str) -> Option<&'a Value> {
        self.used.insert(key.to_string());
        self.map.get(key).filter(|value| !value.is_null())
    }

    /// Whether `key` is there at all, null included.
    pub fn present(&self, key: &str) -> bool {
        self.map.contains_key(key)
    }

    /// An error that `key` holds something unsupported.
    pub fn wrong(&self, key: &str, expected: &str) -> ConfigError {
        let found = self.map.get(key).map_or("absent".to_string(), Value::to_string);
        ConfigError::Value { key: self.key(key), found, expected: expected.to_string() }
    }

    fn missing(&self, key: &str, expected: &str) -> ConfigError {
        ConfigError::Missing { key: self.key(key), expected: expected.to_string() }
    }

    /// A non-negative integer that must be there.
    pub fn usize(&mut self, key: &str) -> Result<usize, ConfigError> {
        self.usize_opt(key)?.ok_or_else(|| self.missing(key, "a whole number"))
    }

    /// A size: an integer of at least 1 and at most 2^31.
    pub fn size(&mut self, key: &str) -> Result<usize, ConfigError> {
        match self.usize(key)? {
            n if (1..=1 << 31).contains(&n) => Ok(n),
            _ => Err(self.wrong(key, "a whole number from 1 to 2147483648")),
        }
    }

    /// A number of layers or experts: from 1 to 65536, so that nothing is made for each of more.
    pub fn count(&mut self, key: &str) -> Result<usize, ConfigError> {
        match self.usize(key)? {
            n if (1..=1 << 16).contains(&n) => Ok(n),
            _ => Err(self.wrong(key, "a whole number from 1 to 65536")),
        }
    }

    /// A non-negative integer, where it is given.
    pub fn usize_opt(&mut self, key: &str) -> Result<Option<usize>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match value.as_u64().and_then(|n| usize::try_from(n).ok()) {
                Some(n) => Ok(Some(n)),
                None => Err(self.wrong(key, "a whole number that is not negative")),
            },
        }
    }

    /// A finite number, where it is given.
    pub fn f64_opt(&mut self, key: &str) -> Result<Option<f64>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => match value.as_f64().filter(|v| v.is_finite()) {
                Some(v) => Ok(Some(v)),
                None => Err(self.wrong(key, "a finite number")),
            },
        }
    }

    /// The ε of a norm, `default` where absent: from 0 to below 1, so that no root is taken of less than 0.
    pub fn eps(&mut self, key: &str, default: f64) -> Result<f32, ConfigError> {
        match self.f64_opt(key)?.unwrap_or(default) {
            eps if (0.0..1.0).contains(&eps) => Ok(eps as f32),
            _ => Err(self.wrong(key, "a number from 0 to below 1")),
        }
    }

    /// A finite number that must be there.
    pub fn f64(&mut self, key: &str) -> Result<f64, ConfigError> {
        self.f64_opt(key)?.ok_or_else(|| self.missing(key, "a number"))
    }

    /// A truth value, `default` where absent.
    pub fn bool(&mut self, key: &str, default: bool) -> Result<bool, ConfigError> {
        match self.get(key) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| self.wrong(key, "true or false")),
        }
    }

    /// A string, where it is given.
    pub fn str_opt(&mut self, key: &str) -> Result<Option<&'a str>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => value.as_str().map(Some).ok_or_else(|| self.wrong(key, "a string")),
        }
    }

    /// An object, where it is given.
    pub fn object(&mut self, key: &str) -> Result<Option<&'a Map<String, Value>>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => value.as_object().map(Some).ok_or_else(|| self.wrong(key, "an object")),
        }
    }

    /// A list, where it is given.
    pub fn list(&mut self, key: &str) -> Result<Option<&'a Vec<Value>>, ConfigError> {
        match self.get(key) {
            None => Ok(None),
            Some(value) => value.as_array().map(Some).ok_or_else(|| self.wrong(key, "a list")),
        }
    }

    /// A list of integers, where it is given.
    pub fn usizes(&mut self, key: &str) -> Result<Option<Vec<usize>>, ConfigError> {
        let Some(list) = self.list(key)? else { return Ok(None) };
        let numbers: Option<Vec<usize>> = list.iter().map(|v| v.as_u64().map(|n| n as usize)).collect();
        numbers.map(Some).ok_or_else(|| self.wrong(key, "a list of whole numbers"))
    }

    /// A list of numbers, where it is given.
    pub fn f64s(&mut self, key: &str) -> Result<Option<Vec<f64>>, ConfigError> {
        let Some(list) = self.list(key)? else { return Ok(None) };
        let numbers: Option<Vec<f64>> = list.iter().map(Value::as_f64).collect();
        numbers.map(Some).ok_or_else(|| self.wrong(key, "a list of numbers"))
    }

    /// A list of strings, where it is given.
    pub fn strs(&mut self, key: &str) -> Result<Option<Vec<&'a str>>, ConfigError> {
        let Some(list) = self.list(key)? else { return Ok(None) };
        let strings: Option<Vec<&str>> = list.iter().map(Value::as_str).collect();
        strings.map(Some).ok_or_else(|| self.wrong(key, "a list of strings"))
    }

    /// Requires that `key` is absent or one of `allowed`: a switch whose other settings are not
    /// supported.
    pub fn only(&mut self, key: &str, allowed: &[Value]) -> Result<(), ConfigError> {
        match self.get(key) {
            None => Ok(()),
            Some(value) if allowed.contains(value) => Ok(()),
            Some(_) => {
                let list: Vec<String> = allowed.iter().map(Value::to_string).collect();
                Err(self.wrong(key, &list.join(" or ")))
            }
        }
    }

    /// Marks keys as known and without effect on the computation.
    pub fn inert(&mut self, keys: &[&str]) {
        self.inert.extend(keys.iter().map(|key| key.to_string()));
    }

    /// Every key of the object with what became of it so far, in the order of the map.
    pub fn account(&self, allowed: &[String]) -> Vec<(String, KeyUse)> {
        let fate = |(key, value): (&String, &Value)| {
            let full = self.key(key);
            let fate = match () {
                () if self.used.contains(key) => KeyUse::Read,
                () if self.inert.contains(key) || INERT.contains(&key.as_str()) => KeyUse::Inert,
                () if value.is_null() || value == &Value::Bool(false) => KeyUse::Off,
                () if allowed.contains(&full) => KeyUse::Allowed,
                () => KeyUse::Unknown,
            };
            (full, fate)
        };
        self.map.iter().map(fate).collect()
    }

    /// Refuses any key that nobody consumed, unless it is inert, null or false, or in `allowed`.
    /// Returns the keys that were passed over because they are null, false or allowed.
    pub fn finish(self, allowed: &[String]) -> Result<Vec<String>, ConfigError> {
        let account = self.account(allowed);
        if let Some((n, (key, _))) =
            account.iter().enumerate().find(|(_, (_, fate))| *fate == KeyUse::Unknown)
        {
            let found = self.map.values().nth(n).map(Value::to_string).unwrap_or_default();
            return Err(ConfigError::Unknown { key: key.clone(), found });
        }
        let passed = |(key, fate)| matches!(fate, KeyUse::Off | KeyUse::Allowed).then_some(key);
        Ok(account.into_iter().filter_map(passed).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn map(value: Value) -> Map<String, Value> {
        value.as_object().unwrap().clone()
    }

    #[test]
    fn an_unknown_key_is_refused_by_name() {
        let map = map(json!({"hidden_size": 8, "bos_token_id": 1, "new_thing": 2, "off": false}));
        let mut reader = ConfigReader::new(&map, "");
        assert_eq!(reader.size("hidden_size"), Ok(8));
        let error = reader.finish(&[]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "config key new_thing (= 2) is not understood and may change the computation; \
             pass --allow-unknown new_thing to ignore it"
        );
        let reader = ConfigReader::new(&map, "");
        let allowed = ["new_thing".to_string(), "hidden_size".to_string()];
        assert_eq!(reader.finish(&allowed).unwrap(), ["hidden_size", "new_thing", "off"]);
    }

    #[test]
    fn every_key_is_accounted_for() {
        let map = map(
            json!({"hidden_size": 8, "bos_token_id": 1, "mask": 3, "new_thing": 2, "off": false, "mine": 1}),
        );
        let mut reader = ConfigReader::new(&map, "rope.");
        reader.size("hidden_size").unwrap();
        reader.inert(&["mask"]);
        let account: Vec<_> = reader.account(&["rope.mine".to_string()]);
        let fate = |key: &str| account.iter().find(|(k, _)| k == key).unwrap().1;
        assert_eq!(fate("rope.hidden_size"), KeyUse::Read);
        assert_eq!([fate("rope.bos_token_id"), fate("rope.mask")], [KeyUse::Inert; 2]);
        assert_eq!([fate("rope.off"), fate("rope.mine")], [KeyUse::Off, KeyUse::Allowed]);
        assert_eq!(fate("rope.new_thing"), KeyUse::Unknown);
    }

    #[test]
    fn values_of_the_wrong_kind_are_refused() {
        let map = map(json!({"a": -1, "b": "x", "c": 0, "d": 1.5, "many": 2_000_000_000}));
        let mut reader = ConfigReader::new(&map, "rope_parameters.");
        assert!(reader.usize("a").unwrap_err().to_string().starts_with("config key rope_parameters.a is -1"));
        assert!(reader.bool("b", false).is_err());
        assert!(reader.size("c").is_err());
        assert!(reader.count("many").unwrap_err().to_string().contains("from 1 to 65536"));
        assert!(reader.usizes("d").is_err());
        assert_eq!(reader.f64("d"), Ok(1.5));
        assert!(reader.eps("a", 1e-6).is_err() && reader.eps("d", 1e-6).is_err());
        assert_eq!(reader.eps("absent", 1e-5), Ok(1e-5));
        assert!(matches!(reader.f64("e"), Err(ConfigError::Missing { .. })));
    }
}
