//! What every family refuses, tried on every bundled package: a config or a tensor that is not
//! understood stops with its name.

use fixtures::Package;
use serde_json::{Map, Value, json};
use spec::{Config, ConfigError, LoadError, Rows, Tensors, Weights};
use std::path::PathBuf;
use std::sync::Arc;

fn packages() -> Vec<Package> {
    let bundled = fixtures::bundled().into_iter().filter_map(|name| Package::open(&name).ok());
    bundled.filter(|package| package.golden_json().is_some()).collect()
}

fn parse(map: &Map<String, Value>) -> Result<Config, ConfigError> {
    Config::parse(map, &[]).map(|parsed| parsed.config)
}

/// Sets the first of `keys` that the config has; false where it has none.
fn set(map: &mut Map<String, Value>, keys: &[&str], value: Value) -> bool {
    let key = keys.iter().find(|key| map.get(**key).is_some_and(|value| !value.is_null()));
    key.map(|key| map.insert(key.to_string(), value)).is_some()
}

#[test]
fn a_key_that_is_not_understood() {
    for package in packages() {
        let mut map = package.config().clone();
        map.insert("new_thing".into(), json!(2));
        let error = parse(&map).unwrap_err();
        assert!(
            matches!(error, ConfigError::Unknown { ref key, .. } if key == "new_thing"),
            "{}: {error}",
            package.name()
        );
        let allowed = Config::parse(&map, &["new_thing".into()]).unwrap();
        assert!(allowed.passed_over.contains(&"new_thing".into()));
    }
}

#[test]
fn an_architecture_that_is_not_known() {
    for package in packages() {
        let mut map = package.config().clone();
        map.insert("model_type".into(), json!("gpt17"));
        let error = parse(&map).unwrap_err().to_string();
        assert!(error.starts_with("config key model_type is \"gpt17\"; supported: llama"), "{error}");
    }
}

#[test]
fn values_that_change_the_mathematics() {
    type Edit = fn(&mut Map<String, Value>) -> bool;
    let edits: [(&str, Edit); 5] = [
        ("hidden_act", |map| set(map, &["hidden_act", "hidden_activation"], json!("mish"))),
        ("layer_types", |map| {
            let types = map.get_mut("layer_types").and_then(Value::as_array_mut);
            types.map(|types| types[0] = json!("telepathic_attention")).is_some()
        }),
        ("rope_type", |map| {
            let Some(rope) = map.get_mut("rope_parameters").and_then(Value::as_object_mut) else {
                return false;
            };
            let nested =
                ["full_attention", "sliding_attention"].iter().find(|kind| rope.contains_key(**kind));
            let rope = match nested {
                Some(kind) => rope[*kind].as_object_mut().unwrap(),
                None => rope,
            };
            set(rope, &["rope_type", "type"], json!("spiral"))
        }),
        ("num_key_value_heads", |map| {
            // 3 divides none of the bundled head counts (4, 6 of llama: then 4 does not).
            let heads = map.get("num_attention_heads").and_then(Value::as_u64).unwrap();
            let kv = (2..).find(|kv| heads % kv != 0).unwrap();
            set(map, &["num_key_value_heads"], json!(kv))
        }),
        ("num_hidden_layers", |map| set(map, &["num_hidden_layers"], json!(0))),
    ];
    for package in packages() {
        for (key, edit) in edits {
            let mut map = package.config().clone();
            if edit(&mut map) {
                let error = parse(&map).expect_err(&format!("{}: {key}", package.name())).to_string();
                let named = error.contains(key) || key == "hidden_act" && error.contains("hidden_activation");
                assert!(named, "{}: {key}: {error}", package.name());
            }
        }
    }
}

/// The tensors of a package with one of them hidden, added or reshaped.
struct Edited<'a> {
    inner: &'a dyn Tensors,
    hidden: Option<&'a str>,
    added: Option<&'a str>,
    reshaped: Option<&'a str>,
}

impl Tensors for Edited<'_> {
    fn names(&self) -> Vec<String> {
        let names = self.inner.names().into_iter().filter(|name| Some(&**name) != self.hidden);
        names.chain(self.added.map(str::to_string)).collect()
    }

    fn shape(&self, name: &str) -> Option<Vec<usize>> {
        if self.added == Some(name) {
            return Some(vec![1]);
        }
        let mut shape = self.inner.shape(name).filter(|_| self.hidden != Some(name))?;
        if self.reshaped == Some(name) {
            *shape.last_mut()? += 1;
        }
        Some(shape)
    }

    fn rows(&self, name: &str) -> Option<Result<Arc<dyn Rows>, LoadError>> {
        self.inner.rows(name)
    }

    fn file(&self, name: &str) -> PathBuf {
        self.inner.file(name)
    }
}

#[test]
fn every_tensor_is_needed_and_has_its_shape() {
    for package in packages() {
        let config = parse(package.config()).unwrap();
        let inner = package.tensors();
        for name in inner.names() {
            let hidden = Edited { inner, hidden: Some(&name), added: None, reshaped: None };
            let error = Weights::load(&config, &hidden).expect_err(&name);
            // Without its stack a mixture is looked for expert by expert.
            let stack = name.ends_with("experts.gate_up_proj");
            let missing = |tensor: &str| tensor == name || stack && tensor.contains(".experts.0.");
            assert!(
                matches!(&error, LoadError::Missing { tensor, .. } if missing(tensor)),
                "{name}: {error}"
            );
            let reshaped = Edited { inner, hidden: None, added: None, reshaped: Some(&name) };
            let error = Weights::load(&config, &reshaped).expect_err(&name);
            assert!(matches!(&error, LoadError::Shape { tensor, .. } if *tensor == name), "{name}: {error}");
        }
    }
}

#[test]
fn a_tensor_that_is_left_over() {
    for package in packages() {
        let config = parse(package.config()).unwrap();
        let added = Edited {
            inner: package.tensors(),
            hidden: None,
            added: Some("model.layers.0.self_attn.twist.weight"),
            reshaped: None,
        };
        let error = Weights::load(&config, &added).expect_err(package.name());
        assert!(matches!(error, LoadError::LeftOver { count: 1, .. }), "{}: {error}", package.name());
    }
}
