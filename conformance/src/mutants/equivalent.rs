//! Mutants that compute the same: recorded with a reason, so that they do not count as blind spots.

use super::Mutant;
use reference::{Call, Tensor};
use spec::families::moe::Scoring;

/// Why `mutant` must give what the honest op gives at this call, where that is so.
pub fn equivalent(mutant: &Mutant, call: &Call<Tensor>) -> Option<&'static str> {
    match (mutant.id, mutant.variant, call) {
        ("moe-softmax-after-topk", "", Call::RouterWeights { router, .. })
            if router.scoring == (Scoring::Softmax { norm_topk_prob: true }) =>
        {
            Some("with renormalised weights the sum over the other experts cancels")
        }
        ("moe-renorm", "", Call::RouterWeights { router, .. })
            if router.num_experts_per_tok == router.num_experts
                && matches!(router.scoring, Scoring::Softmax { .. }) =>
        {
            Some("every expert is chosen, so the probabilities add up to 1 already")
        }
        ("q-round-trunc", "association", Call::Linear { .. }) => {
            Some("both orders round two products of the same size: the contract declares no finer difference")
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mutants::{History, all};
    use ndarray::array;
    use spec::Site;
    use spec::families::moe::Router;

    fn weights(scoring: Scoring, k: usize) -> (Option<&'static str>, Vec<(f32, f32)>) {
        let logits = array![[0.5f32, -1.0, 2.0, 0.25]].into_dyn().into_shared();
        let chosen = vec![2.0f32, 0.0, 3.0, 1.0][..k].to_vec();
        let index = Tensor::from_shape_vec(ndarray::IxDyn(&[1, k]), chosen).unwrap();
        let router = Router { num_experts: 4, num_experts_per_tok: k, scoring };
        let call = Call::RouterWeights { logits: &logits, index: &index, router: &router };
        let name = if k == 4 { "moe-renorm" } else { "moe-softmax-after-topk" };
        let mutant = all().find(|m| m.name() == name).unwrap();
        let mut plain = reference::Plain::default();
        let honest = plain.value(&call);
        let at = Site::layer(0, "router_weights");
        let wrong = (mutant.apply)(&call, at, &History::new(), &mut |call| plain.value(call)).unwrap();
        (equivalent(mutant, &call), honest.iter().copied().zip(wrong.iter().copied()).collect())
    }

    #[test]
    fn renormalised_softmax_does_not_depend_on_the_others() {
        let (reason, pairs) = weights(Scoring::Softmax { norm_topk_prob: true }, 2);
        assert!(reason.is_some());
        assert!(pairs.iter().all(|(a, b)| (a - b).abs() < 1e-6), "{pairs:?}");
        // Without the norm it does.
        let (reason, pairs) = weights(Scoring::Softmax { norm_topk_prob: false }, 2);
        assert!(reason.is_none());
        assert!(pairs.iter().any(|(a, b)| (a - b).abs() > 1e-3), "{pairs:?}");
    }

    // C = 16257, sA = 1/3, sW = 0.01: either order is within one unit in the last place of the exact product.
    #[test]
    fn both_associations_are_as_near() {
        let w = spec::families::Linear {
            weight: spec::Matrix::from_values("w", 1, 2, vec![1.27, 0.64]),
            bias: None,
        };
        let x = array![[127.0f32 / 3.0, 2.0 / 3.0]].into_dyn().into_shared();
        let call = Call::Linear { x: &x, w: &w };
        let mutant = all().find(|m| m.name() == "q-round-trunc:association").unwrap();
        assert!(equivalent(mutant, &call).is_some());
        let contract = crate::contract::Contract::named("int8").unwrap();
        let mut honest = crate::emulate::Emulate::new(&contract);
        let at = Site::layer(0, "q_proj");
        let wrong = (mutant.apply)(&call, at, &History::new(), &mut |call| honest.value(at, call)).unwrap();
        let exact = 16257.0 * f64::from(127.0f32 / 3.0 / 127.0) * f64::from(1.27f32 / 127.0);
        for y in [honest.value(at, &call)[[0, 0]], wrong[[0, 0]]] {
            assert!((f64::from(y) - exact).abs() <= crate::variance::ulp(exact), "{y} against {exact}");
        }
    }

    #[test]
    fn all_probabilities_add_up_to_one() {
        let (reason, pairs) = weights(Scoring::Softmax { norm_topk_prob: true }, 4);
        assert!(reason.is_some());
        assert!(pairs.iter().all(|(a, b)| (a - b).abs() < 1e-6), "{pairs:?}");
    }
}
