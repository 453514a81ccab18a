//! Mixtures of experts: the router, and the experts' weights.

use super::Linear;
use crate::config::{ConfigError, ConfigReader};
use crate::matrix::Matrix;
use crate::tensors::{LoadError, Loader};

/// How a token's experts are chosen and weighed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Router {
    /// Number of experts.
    pub num_experts: usize,
    /// Experts a token is sent to.
    pub num_experts_per_tok: usize,
    /// What they are chosen by and weighed with.
    pub scoring: Scoring,
}

/// The rule of a router.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scoring {
    /// Softmax over all experts; the chosen ones' probabilities, renormalised or not.
    Softmax {
        /// Whether the weights are divided by their sum.
        norm_topk_prob: bool,
    },
    /// Softmax over the chosen logits only (gpt_oss).
    SoftmaxOfChosen,
    /// Scores that are probabilities already: the chosen ones divided by their sum (gemma4).
    Probabilities,
    /// σ of each logit, chosen within the best groups with a bias that the weights do not have
    /// (deepseek_v3, glm4_moe).
    Sigmoid {
        /// Number of groups of neighbouring experts.
        n_group: usize,
        /// Groups that a token's experts may come from.
        topk_group: usize,
        /// Whether the weights are divided by their sum.
        norm_topk_prob: bool,
        /// What the weights are multiplied by at last.
        routed_scaling_factor: f64,
    },
}

impl Router {
    /// Reads the number of experts from the first of `keys` that is there, and `num_experts_per_tok`.
    pub fn parse(r: &mut ConfigReader, keys: &[&str], scoring: Scoring) -> Result<Router, ConfigError> {
        let mut num_experts = None;
        for key in keys {
            let found = r.usize_opt(key)?;
            num_experts = num_experts.or(found.map(|n| (*key, n)));
        }
        let Some((key, num_experts)) = num_experts else {
            return Err(ConfigError::Missing {
                key: keys[0].into(),
                expected: "the number of experts".into(),
            });
        };
        // Expert ids are values at a site: f32 holds whole numbers up to 2^24.
        if !(1..=1 << 24).contains(&num_experts) {
            return Err(r.wrong(key, "a whole number from 1 to 16777216"));
        }
        let num_experts_per_tok = r.size("num_experts_per_tok")?;
        if num_experts_per_tok > num_experts {
            return Err(r.wrong("num_experts_per_tok", &format!("at most the {num_experts} experts")));
        }
        Ok(Router { num_experts, num_experts_per_tok, scoring })
    }

    /// Reads the sigmoid router of deepseek_v3 and glm4_moe.
    pub fn parse_sigmoid(r: &mut ConfigReader) -> Result<Router, ConfigError> {
        r.only("scoring_func", &["sigmoid".into()])?;
        r.only("topk_method", &["noaux_tc".into()])?;
        let n_group = r.usize_opt("n_group")?.unwrap_or(1);
        let topk_group = r.usize_opt("topk_group")?.unwrap_or(1);
        let scoring = Scoring::Sigmoid {
            n_group,
            topk_group,
            norm_topk_prob: r.bool("norm_topk_prob", true)?,
            routed_scaling_factor: r.f64_opt("routed_scaling_factor")?.unwrap_or(1.0),
        };
        let router = Router::parse(r, &["n_routed_experts", "num_local_experts"], scoring)?;
        if n_group == 0 || router.num_experts % n_group != 0 {
            let expected = format!("a divisor of the {} experts", router.num_experts);
            return Err(r.wrong("n_group", &expected));
        }
        let needed = router.num_experts_per_tok.div_ceil(router.num_experts / n_group);
        if !(needed..=n_group).contains(&topk_group) {
            let expected = format!("{needed} to {n_group}: groups enough for num_experts_per_tok");
            return Err(r.wrong("topk_group", &expected));
        }
        Ok(router)
    }
}

/// The experts of one layer; each list has one entry an expert.
#[derive(Clone, Debug)]
pub struct Experts {
    /// `[moe_intermediate, hidden]` each
    pub gate_proj: Vec<Linear>,
    /// `[moe_intermediate, hidden]` each
    pub up_proj: Vec<Linear>,
    /// `[hidden, moe_intermediate]` each
    pub down_proj: Vec<Linear>,
}

impl Experts {
    /// Takes `{name}.{e}.{gate,up,down}_proj.weight`, or the stacks `{name}.gate_up_proj`
    /// `[experts, 2 · inner, hidden]` (rows of gate, then up) and `{name}.down_proj`
    /// `[experts, hidden, inner]` where the checkpoint has those.
    pub fn load(
        loader: &mut Loader,
        name: &str,
        count: usize,
        hidden: usize,
        inner: usize,
    ) -> Result<Experts, LoadError> {
        let mut experts = Experts { gate_proj: vec![], up_proj: vec![], down_proj: vec![] };
        let plain = |weight: Matrix| Linear { weight, bias: None };
        let (fused, down) = (format!("{name}.gate_up_proj"), format!("{name}.down_proj"));
        if loader.has(&fused) {
            let fused = loader.stack(&fused, count, 2 * inner, hidden)?;
            let down = loader.stack(&down, count, hidden, inner)?;
            for e in 0..count {
                let first = 2 * inner * e;
                experts.gate_proj.push(plain(fused.rows(first..first + inner)));
                experts.up_proj.push(plain(fused.rows(first + inner..first + 2 * inner)));
                experts.down_proj.push(plain(down.rows(hidden * e..hidden * (e + 1))));
            }
            return Ok(experts);
        }
        for e in 0..count {
            let mut take = |leaf: &str, out, inner| {
                Linear::load(loader, &format!("{name}.{e}.{leaf}"), out, inner, false)
            };
            experts.gate_proj.push(take("gate_proj", inner, hidden)?);
            experts.up_proj.push(take("up_proj", inner, hidden)?);
            experts.down_proj.push(take("down_proj", hidden, inner)?);
        }
        Ok(experts)
    }

    /// Every matrix.
    pub fn matrices(&mut self) -> impl Iterator<Item = &mut Matrix> {
        let all = self.gate_proj.iter_mut().chain(&mut self.up_proj).chain(&mut self.down_proj);
        all.map(|linear| &mut linear.weight)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn sigmoid(value: Value) -> Result<Router, ConfigError> {
        Router::parse_sigmoid(&mut ConfigReader::new(value.as_object().unwrap(), ""))
    }

    #[test]
    fn groups_must_fit_the_experts() {
        let value = |n_group: usize, topk_group: usize, k: usize| json!({"n_routed_experts": 8, "n_group": n_group, "topk_group": topk_group, "num_experts_per_tok": k});
        assert!(sigmoid(value(4, 2, 3)).is_ok());
        assert_eq!(
            sigmoid(value(3, 1, 2)).unwrap_err().to_string(),
            "config key n_group is 3; supported: a divisor of the 8 experts"
        );
        assert_eq!(
            sigmoid(value(4, 1, 3)).unwrap_err().to_string(),
            "config key topk_group is 1; supported: 2 to 4: groups enough for num_experts_per_tok"
        );
        assert!(sigmoid(value(4, 5, 3)).is_err());
        assert_eq!(
            sigmoid(value(4, 4, 9)).unwrap_err().to_string(),
            "config key num_experts_per_tok is 9; supported: at most the 8 experts"
        );
    }
}
