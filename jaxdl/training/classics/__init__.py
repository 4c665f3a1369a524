"""Classical methods on the mesh of a run: k-means, principal components, ridge and logistic regression.

Rows are sharded over the batch axes of the mesh. Every step is plain `jit`: a sum over the rows becomes an all-reduce,
which XLA inserts, of a result whose size does not depend on the number of rows. Results are NumPy arrays, the same on
any mesh up to the order of float32 sums, and they follow scikit-learn's definitions.
"""

from jaxdl.training.classics.components import PrincipalComponents, pca
from jaxdl.training.classics.kmeans import Clusters, kmeans, kmeans_plus_plus
from jaxdl.training.classics.logistic import LogisticRegression, logistic
from jaxdl.training.classics.ridge import RidgeRegression, ridge

__all__ = [
    "Clusters",
    "LogisticRegression",
    "PrincipalComponents",
    "RidgeRegression",
    "kmeans",
    "kmeans_plus_plus",
    "logistic",
    "pca",
    "ridge",
]
