//! S11: a step on resident images against the same step with every weight packed again.

use super::BenchError;
use super::figure::{Figure, Goal, Pair, Spec, Timed};
use crate::ab::{Arm, ArmRun, compare};
use device::{Engine, Switches};
use fixtures::seeded::{Kind, Shape, decoder};
use spec::{Config, Weights};

/// S11.
pub const RESIDENT: Spec = Spec {
    id: "S11",
    what: "step on resident images: time over that of the same step with reload=all",
    goal: Goal::AtMost(0.5),
    stretch: None,
};

/// S11 on a seeded model of 11 M weights.
pub fn figure(pairs: usize) -> Result<Figure, BenchError> {
    let shape = Shape {
        family: "llama",
        layers: 4,
        hidden: 512,
        heads: 8,
        kv_heads: 2,
        head_dim: 64,
        intermediate: 1408,
        vocab: 2048,
        window: None,
        kind: Kind::Plain,
    };
    let model = decoder("bench", &shape, 11);
    let config = Config::parse(&model.config, &[])?.config;
    let weights = Weights::load(&config, &model)?;
    let arm = |name: &str, switches: &str| {
        let arm = Arm { name: name.into(), switches: switches.into() };
        Switches::parse(switches).map(|parsed| (arm, parsed))
    };
    let arms = [arm("resident", "")?, arm("reload", "reload=all")?];
    // Two and two, so that a drift of the machine falls on both arms alike.
    let order: String = (0..pairs).map(|n| if n % 2 == 0 { "AB" } else { "BA" }).collect();
    let prompt = model.prompt[..8].to_vec();
    let result = compare(&config, &weights, Engine::Int8, &arms, &order, &[prompt], 5)?;
    let of = |name: &str| result.runs.iter().filter(|run| run.arm == name).collect::<Vec<&ArmRun>>();
    let (resident, reload) = (of("resident"), of("reload"));
    let pairs = resident.iter().zip(&reload).map(|(a, b)| Pair { over: a.decode_ms, under: b.decode_ms });
    let decoded = resident.iter().map(|run| run.dequantised_bytes_per_token).max().unwrap_or(0);
    let fault = match (result.byte_identical.0 == result.byte_identical.1 && result.tokens_equal, decoded) {
        (false, _) => Some("the arms give other bytes".to_string()),
        (true, 0) => None,
        (true, bytes) => Some(format!("a step on resident images decodes {bytes} bytes")),
    };
    let timed = Timed { pairs: pairs.collect(), fault };
    let (a, b) = timed.medians();
    let rates = format!("{a:.2} ms a step, {b:.1} ms with reload=all; 0 bytes decoded, same logits");
    let rates = timed.fault.is_none().then_some(rates);
    Ok(Figure { rates, ..RESIDENT.judge(&timed) })
}
