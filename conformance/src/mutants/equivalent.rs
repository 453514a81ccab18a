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

    #[test]
    fn all_probabilities_add_up_to_one() {
        let (reason, pairs) = weights(Scoring::Softmax { norm_topk_prob: true }, 4);
        assert!(reason.is_some());
        assert!(pairs.iter().all(|(a, b)| (a - b).abs() < 1e-6), "{pairs:?}");
    }
}
