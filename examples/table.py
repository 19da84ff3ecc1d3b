"""Tables: probabilities for rows, how good they are, and which columns they rest on.

    python examples/table.py

The data are 569 tumours of scikit-learn's breast cancer data; every sixth is held out as a test.
"""

# %% Data
import numpy as np
from sklearn.datasets import load_breast_cancer

import addnorm
from addnorm.tabular import InstantClassifier

data = load_breast_cancer(as_frame=True)
rows = data.frame.assign(target=np.array(["malignant", "benign"])[data.target])
test = rows.iloc[::6]
train = rows.drop(test.index)

# %% Train: types of columns, size and steps are chosen from the table
run = addnorm.train("table", train, target="target", progress=False)
print({name: round(value, 4) for name, value in run.evaluate(test).items()})

# %% Predict
new = test.drop(columns="target")
print(run.predict_proba(new)[:3].round(3), run.labels)

# %% Which columns?
importance = addnorm.explain(run, test)
for column, rise in importance.ranked()[:5]:
    print(f"{column}: the loss rises by {rise:.4f} when it is shuffled")

# %% Without training: the rows of the table are the model
instant = InstantClassifier().fit(train.drop(columns="target"), train["target"])
print("instant:", round(instant.score(new, test["target"]), 4))
