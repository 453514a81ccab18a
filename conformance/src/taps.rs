//! What a subject shows in one pass.

use reference::Tensor;
use spec::Site;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// Reads a value, or says why it could not.
pub type ReadValue = Arc<dyn Fn() -> Result<Tensor, String> + Send + Sync>;

/// The values of a subject in one pass, by site: held, or read each time that they are looked at, so that a dump
/// larger than memory can be judged.
#[derive(Clone, Debug, Default)]
pub struct PassTaps {
    taps: BTreeMap<Site, Value>,
    lost: Arc<Mutex<Vec<String>>>,
}

#[derive(Clone)]
enum Value {
    Held(Tensor),
    Stored { shape: Vec<usize>, read: ReadValue },
}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Value::Held(tensor) => write!(f, "held {:?}", tensor.shape()),
            Value::Stored { shape, .. } => write!(f, "stored {shape:?}"),
        }
    }
}

impl PassTaps {
    /// No values.
    pub fn new() -> Self {
        Self::default()
    }

    /// Keeps a value, instead of one that was there.
    pub fn insert(&mut self, site: Site, value: Tensor) {
        self.taps.insert(site, Value::Held(value));
    }

    /// Notes where a value of this shape can be read.
    pub fn insert_stored(&mut self, site: Site, shape: Vec<usize>, read: ReadValue) {
        self.taps.insert(site, Value::Stored { shape, read });
    }

    /// Forgets a value.
    pub fn remove(&mut self, site: &Site) {
        self.taps.remove(site);
    }

    /// Whether there is a value.
    pub fn contains(&self, site: &Site) -> bool {
        self.taps.contains_key(site)
    }

    /// The sites, in their order.
    pub fn sites(&self) -> impl Iterator<Item = &Site> {
        self.taps.keys()
    }

    /// The shapes of all values; none is read for that.
    pub fn shapes(&self) -> impl Iterator<Item = (Site, &[usize])> {
        self.taps.iter().map(|(site, value)| {
            let shape = match value {
                Value::Held(tensor) => tensor.shape(),
                Value::Stored { shape, .. } => shape,
            };
            (*site, shape)
        })
    }

    /// The value of a site. One that cannot be read, or changed its shape since it was noted, is as if it were not shown;
    /// [`PassTaps::take_lost`] tells.
    pub fn get(&self, site: &Site) -> Option<Tensor> {
        match self.taps.get(site)? {
            Value::Held(tensor) => Some(tensor.clone()),
            Value::Stored { shape, read } => {
                let same = |value: Tensor| match value.shape() == shape {
                    true => Ok(value),
                    false => Err(format!("{site} had shape {shape:?} and now has {:?}", value.shape())),
                };
                read().and_then(same).map_err(|reason| self.lose(reason)).ok()
            }
        }
    }

    /// Why values could not be read, each said once.
    pub fn take_lost(&self) -> Vec<String> {
        std::mem::take(&mut *self.lost.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn lose(&self, reason: String) {
        let mut lost = self.lost.lock().unwrap_or_else(PoisonError::into_inner);
        if !lost.contains(&reason) {
            lost.push(reason);
        }
    }
}

impl FromIterator<(Site, Tensor)> for PassTaps {
    fn from_iter<I: IntoIterator<Item = (Site, Tensor)>>(values: I) -> Self {
        let taps = values.into_iter().map(|(site, value)| (site, Value::Held(value))).collect();
        Self { taps, ..Self::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ndarray::{ArcArray, IxDyn};

    fn zeros(shape: &[usize]) -> Tensor {
        ArcArray::zeros(IxDyn(shape))
    }

    #[test]
    fn a_stored_value_is_read_when_it_is_looked_at_and_not_before() {
        let site = Site::model("logits");
        let reads = Arc::new(Mutex::new(0));
        let counted = reads.clone();
        let mut taps = PassTaps::new();
        taps.insert_stored(
            site,
            vec![2, 3],
            Arc::new(move || {
                *counted.lock().unwrap() += 1;
                Ok(zeros(&[2, 3]))
            }),
        );
        assert_eq!(taps.shapes().collect::<Vec<_>>(), [(site, &[2, 3][..])]);
        assert_eq!(*reads.lock().unwrap(), 0);
        assert_eq!(taps.get(&site), Some(zeros(&[2, 3])));
        assert_eq!(*reads.lock().unwrap(), 1);
    }

    // A file that was there when the names were matched, and is gone or another one when its values are wanted.
    #[test]
    fn what_cannot_be_read_is_not_shown_and_is_told() {
        let (gone, other) = (Site::model("embed"), Site::model("logits"));
        let mut taps = PassTaps::new();
        taps.insert_stored(gone, vec![1], Arc::new(|| Err("embed.npy: no such file".to_string())));
        taps.insert_stored(other, vec![2, 3], Arc::new(|| Ok(zeros(&[3, 2]))));
        assert!(taps.contains(&gone));
        assert_eq!((taps.get(&gone), taps.get(&other), taps.get(&gone)), (None, None, None));
        assert_eq!(
            taps.take_lost(),
            ["embed.npy: no such file", "logits had shape [2, 3] and now has [3, 2]"]
        );
        assert!(taps.take_lost().is_empty());
    }
}
