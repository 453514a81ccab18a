//! One self-contained HTML file with pictures: no network, opens from disk.

use crate::judge::Heat;
use crate::verify::PackageResult;
use serde_json::{Value, json};

const TEMPLATE: &str = include_str!("verify.html");

/// The report of `verify`.
pub fn verify(results: &[PackageResult]) -> String {
    let data: Vec<Value> = results.iter().map(entry).collect();
    // "</script>" inside a string would end the element that holds the data.
    let data = serde_json::to_string(&data).expect("names and numbers").replace("</", "<\\/");
    TEMPLATE.replacen("@DATA@", &data, 1)
}

/// A result with what only pictures need.
fn entry(result: &PackageResult) -> Value {
    let mut value = serde_json::to_value(result).expect("names and numbers");
    value["inherited"] = json!(result.inherited);
    value["positions"] = json!(result.positions);
    if let Some(sites) = value["sites"].as_array_mut() {
        for (site, result) in sites.iter_mut().zip(&result.sites) {
            site["histogram"] = json!(result.histogram);
            site["heat"] = result.heat.as_ref().map_or(Value::Null, heat);
        }
    }
    value
}

fn heat(heat: &Heat) -> Value {
    json!({
        "rows": heat.rows, "cols": heat.cols, "row_step": heat.row_step, "col_step": heat.col_step,
        "values": heat.values.iter().map(|v| (v * 100.0).round() / 100.0).collect::<Vec<f32>>(),
    })
}
