//! A picture of the bytes that each rank wrote of each tensor.

use std::fmt::Write;

use burn_dtensor::checkpoint::CheckpointSummary;

use crate::size;

/// Width and height of a cell.
const CELL: [f64; 2] = [28.0, 16.0];
/// Width of a letter.
const LETTER: f64 = 6.7;

/// Returns an SVG with a row for each tensor and a column for each rank. The more bytes, the darker
/// the cell; the last row has the bytes of all tensors.
pub fn picture(summary: &CheckpointSummary) -> String {
    let all = summary.bytes_by_rank();
    let mut rows: Vec<(&str, Vec<u64>)> = summary
        .tensors
        .iter()
        .map(|(key, tensor)| {
            let mut bytes = vec![0; all.len()];
            for chunk in tensor.chunks.iter().filter(|chunk| chunk.rank < all.len()) {
                bytes[chunk.rank] += chunk.bytes;
            }
            (key.as_str(), bytes)
        })
        .collect();
    rows.push(("all", all));
    let margin = LETTER * rows.iter().map(|(key, _)| key.len()).max().unwrap_or(0) as f64 + 12.0;
    let width = margin + CELL[0] * rows[0].1.len() as f64 + 4.0;
    let height = CELL[1] * (rows.len() + 1) as f64 + 4.0;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width:.0} {height:.0}\" font-family=\"monospace\" \
         font-size=\"11\">\n"
    );
    for rank in 0..rows[0].1.len() {
        let x = margin + CELL[0] * (rank as f64 + 0.5);
        let _ = writeln!(
            text,
            "<text x=\"{x:.1}\" y=\"12\" text-anchor=\"middle\">{rank}</text>"
        );
    }
    for (row, (key, bytes)) in rows.iter().enumerate() {
        let y = CELL[1] * (row + 1) as f64;
        let key = key.replace('&', "&amp;").replace('<', "&lt;");
        let _ = writeln!(text, "<text x=\"4\" y=\"{:.1}\">{key}</text>", y + 12.0);
        let most = bytes.iter().max().copied().unwrap_or(0).max(1);
        for (rank, bytes) in bytes.iter().enumerate() {
            let x = margin + CELL[0] * rank as f64;
            let shade = *bytes as f64 / most as f64;
            let _ = writeln!(
                text,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{}\" height=\"{}\" fill=\"#1f5fa8\" fill-opacity=\"{shade:.3}\" \
                 stroke=\"#ccc\"><title>rank {rank}, {key}: {}</title></rect>",
                CELL[0] - 2.0,
                CELL[1] - 2.0,
                size(*bytes)
            );
        }
    }
    text + "</svg>\n"
}
