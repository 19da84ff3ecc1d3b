"""Examine a Hugging Face model: unchanged, broken on purpose, and before a planned training.

    python examples/clinic.py [MODEL]

MODEL is a local directory of Hugging Face; without one, a small GPT-2 with new weights is examined.
"""

# %% The model
import copy
import sys

import torch
import transformers

import addnorm

torch.manual_seed(0)
if len(sys.argv) > 1:
    model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], local_files_only=True)
else:
    sizes = {"vocab_size": 200, "n_positions": 64, "n_embd": 64, "n_layer": 4, "n_head": 4}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config)
ids = torch.randint(model.config.vocab_size, (4, 32))

# %% What does it look like from outside?
examination = addnorm.examine(model, {"input_ids": ids, "labels": ids}, sharpness=False)
print(examination.text().partition("\n\nsite")[0])

# %% Break it, and look again
wild = copy.deepcopy(model)
with torch.no_grad():
    for parameter in wild.parameters():
        parameter.mul_(20)
broken = addnorm.examine(wild, {"input_ids": ids, "labels": ids}, sharpness=False)
print("\nwith weights 20 times as large:")
for finding in broken.findings:
    print(f"- {finding.name}. Try: {finding.remedy}")

# %% Will it train? The planned training is rehearsed on weights that are restored
batches = [torch.randint(8, (8, 32)).cumsum(1) % model.config.vocab_size for _ in range(70)]
more = [{"input_ids": each, "labels": each} for each in batches]
for lr in (1e-3, 10.0):
    plan = addnorm.clinic.TrainingPlan(lr=lr, steps=300, optimizer="adamw")
    outlook = addnorm.examine(model, more[0], plan=plan, more_batches=more[1:], sharpness=False)
    print(f"learning rate {lr:g}:", outlook.evidence.prediction.answer)
