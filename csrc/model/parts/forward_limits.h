#pragma once

namespace openspec {

/// The most that one forward pass has to hold.
struct ForwardLimits {
  int max_rows = 1;
  int max_spans = 1;
  int max_logits_rows = 1;  // at a time
  int max_tokens = 1;       // of one sequence, drafts included
  int max_step_rows = 1;    // of a decoding sequence's span, in general
  int max_inputs = 0;       // of a linear to hidden_size beside those of the layers
  int max_outputs = 0;      // of another linear beside them
  int max_taps = 0;         // of a BlockConv
};

}  // namespace openspec
